"""Without torch there is no step to test, and without transformers none of its models."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]
if find_spec("transformers") is None:
    collect_ignore_glob.append("test_huggingface.py")
