"""The commands that a shell script would run, derived from its text. Nothing is executed.

`tokens` splits text into words and operators, `syntax` parses commands, `expansion` expands words, `conditions` and
`arithmetic` evaluate, and `script` traverses the commands. Values that the text does not determine (arguments, the
environment, output of other programs) become marks in the words (`marks`).
"""
