"""The commands that a shell script would run, derived from its text. Nothing is executed.

`tokens` splits text into words and operators, `syntax` makes commands of them, `expansion` fills words in, `conditions`
and `arithmetic` decide, and `script` traverses the commands. What the text lacks (arguments, the environment,
other programs' output) stays a mark in the words (`marks`).
"""
