"""One torch call on global tensors.

A call goes through dispatch. The first of its kind is prepared: capture sees the ATen calls, choice asks the rule book
for ways and takes the cheapest, prepare makes a recipe of it; every later one runs the recipe.

dispatch -> recipe              a call that is known
dispatch -> prepare -> capture -> choice      a new one
handlers, formulas, bags, norms, recurrent    functions that are not captured, or are written in terms of others
functions                       custom autograd Functions; rules: rules for ops of one's own
gathered, moved_views           what runs on gathered tensors, and views that had to be moved
refusals                        ways past `__torch_function__`; abstract: tensors without shards, for `explain`
"""
