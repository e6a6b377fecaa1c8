"""JSON documents: the keys of each as a typed dictionary, and the function that fills it in.

At run time a typed dictionary is a plain dictionary, so it costs nothing. mypy checks that all keys are filled in with
the right types, `memcalc schema result` is generated from the same types, and tests validate printed documents.
The string below a key is its description in the schema.
"""
