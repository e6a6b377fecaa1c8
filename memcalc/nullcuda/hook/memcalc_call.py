"""The child process of `null_device.call`: `python -m memcalc_call REQUEST ANSWER`, two files of pickled data."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pickle
import sys
from typing import Any

# ruff: noqa: INP001 -- a directory on PYTHONPATH, not a package
# ruff: noqa: PTH123, S301 -- pathlib costs time; the parent process wrote the file


def main(request: str, answer: str) -> None:
    """Call the function; write its result or its exception before the process ends."""
    with open(request, "rb") as file:
        paths, module, script, name = pickle.load(file)
        sys.path.extend(path for path in paths if path not in sys.path)
        if module == "__main__":
            spec = importlib.util.spec_from_file_location("__mp_main__", script)
            home: Any = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            sys.modules["__mp_main__"] = sys.modules["__main__"] = home
            spec.loader.exec_module(home)  # type: ignore[union-attr]
        else:
            home = importlib.import_module(module)
        arguments, named = pickle.load(file)
    function = functools.reduce(getattr, name.split("."), home)
    try:
        value = function(*arguments, **named)
    except BaseException as error:
        write(answer, False, (type(error).__name__, str(error)))
        raise
    write(answer, True, value)


def write(path: str, *answer: Any) -> None:
    """Write the answer for the parent."""
    with open(path, "wb") as file:
        pickle.dump(answer, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
