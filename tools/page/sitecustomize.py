"""Import the web page's modules from one file; the interpreter runs this before it imports any of them.

Otherwise each of 400 imports would look in several folders and open a file. `compile.py` writes `modules.bin`: the
length of the index, the index, and the modules, of which those that an answer needs are byte code.
"""

import marshal
import site
import sys
from _frozen_importlib import ModuleSpec  # importlib.machinery would import modules before they can be found


class PackedModules:
    """Finder and loader of the modules in a file.

    Args:
        content: the content of the file.
    """

    def __init__(self, content: bytes) -> None:
        begin = 4 + int.from_bytes(content[:4], "little")
        # module -> the path that it would have as a file, whether it is a package, its position, its size
        self.index: dict[str, tuple[str, bool, int, int]] = marshal.loads(content[4:begin])
        self.modules = memoryview(content)[begin:]

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module of the file."""
        if name not in self.index:
            return None
        file, is_package, _, _ = self.index[name]
        spec = ModuleSpec(name, self, origin=file, is_package=is_package)  # type: ignore[arg-type]
        spec.has_location = True
        if is_package:  # the folder has data files and native libraries
            spec.submodule_search_locations = [file.rpartition("/")[0]]
        return spec

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave it to the import system."""

    def exec_module(self, module: object) -> None:
        """Run a module."""
        namespace = vars(module)
        file, _, begin, size = self.index[namespace["__name__"]]
        content = self.modules[begin : begin + size]
        exec(marshal.loads(content) if file.endswith(".pyc") else compile(content, file, "exec"), namespace)


with open(f"{site.getsitepackages()[0]}/modules.bin", "rb") as opened:
    sys.meta_path.insert(0, PackedModules(opened.read()))
