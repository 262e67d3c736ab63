"""The language of plans: texts, lines and statements; no model and no device.

axes, terms        signatures over axes; words and phrases as values
statements         a file for each kind of line: the value, how it is written and read, what it does to a model
plan.lark, syntax  the grammar that statements share; one line -> its statement, and where its parts stand
syntax_error       the errors of lines that are no statement
lines, read        a text -> its lines; errors that show them
plan_text          a text with its lines
diff               two plans side by side
"""
