"""Commands that start a training program: `torchrun ... train.py --model_name_or_path ...` in a script.

`command` splits a command into launcher and program, and counts its processes. `document` makes of the program's
options, and of the files that they name, the document that its framework's importer reads.
"""
