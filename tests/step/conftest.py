"""Without torch there is no step to test, and without transformers or PEFT none of their models."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]
if find_spec("transformers") is None:
    collect_ignore_glob.append("test_huggingface.py")
if find_spec("peft") is None:  # looked for, not imported: that takes seconds
    collect_ignore_glob.append("test_adapters.py")
