"""What a shell script would run, as far as its own text says it. Nothing is executed.

`tokens` splits text into words and operators, `syntax` makes commands of them, `expansion` fills words in, `conditions`
and `arithmetic` decide, and `script` goes through the commands. What the text does not say (arguments, the environment,
other programs' output) stays a mark in the words (`marks`).
"""
