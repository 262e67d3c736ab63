"""The language of plans: texts, lines and statements; no model and no device.

statements         the lines of a plan, as values that print as they are written
plan.lark, terms, words   the grammar, what its terms are as values, and the words that it knows
syntax, syntax_error      one line -> its statement, and where its parts stand; or what is wrong there
lines, read        a text -> its lines; errors that show them
plan_text          a text with its lines
diff               two plans side by side
"""
