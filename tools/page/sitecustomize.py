"""Import the web page's modules from two files; the interpreter runs this before it imports any of them.

Otherwise each of 400 imports would look in several folders and open a file. `compile.py` writes `modules.bin`: the
length of its head, the head, and the modules that estimates load, as byte code. All other modules are in `rest.bin`,
which is fetched when the first of them is imported.

What modules compile when they are imported is compiled by `compile.py` as well: `dataclass` and `namedtuple` write
source code and run it, annotations are text, and `re` translates patterns in Python.
"""

import _sre  # type: ignore[import-not-found]
import marshal
import site
import sys
from _frozen_importlib import ModuleSpec  # importlib.machinery would import modules before they can be found


class PackedModules:
    """Finder and loader of the modules in the two files.

    Args:
        content: the content of `modules.bin`.
    """

    def __init__(self, content: bytes) -> None:
        begin = 4 + int.from_bytes(content[:4], "little")
        head = marshal.loads(content[4:begin])
        # module -> the path that it would have as a file, whether it is a package, its position, its size
        self.index: dict[str, tuple[str, bool, int, int]] = head["index"]
        self.rest_checksum: int = head["rest"]
        self.sources: dict[str, str] = head["sources"]  # source code -> its byte code, which runs as the source does
        self.patterns: dict[tuple[object, int], tuple[object, ...]] = head["patterns"]  # arguments of _sre.compile
        self.modules, self.rest = memoryview(content)[begin:], memoryview(b"")

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module of the files."""
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
        name = namespace["__name__"]
        file, _, begin, size = self.index[name]
        content = self.content(begin, size)
        exec(marshal.loads(content) if file.endswith(".pyc") else compile(content, file, "exec"), namespace)
        namespace |= self.shortcuts(name, namespace)

    def shortcuts(self, module: str, names: dict[str, object]) -> dict[str, object]:
        """Return what replaces names of a module of the standard library. Without it, imports take a third longer."""
        sources, patterns = self.sources, self.patterns
        if module == "dataclasses":
            return {"exec": lambda source, *scopes: exec(sources.get(source) or source, *scopes)}
        if module == "collections":
            return {"eval": lambda source, *scopes: eval(sources.get(source) or source, *scopes)}  # noqa: S307
        if module == "annotationlib":
            return {"compile": lambda source, *kind: sources.get(source) or compile(source, *kind)}
        if module == "typing":  # nothing reads the annotations of named tuples: they remain text
            return {"_make_eager_annotate": lambda annotations: lambda _: annotations}
        if module == "re._compiler":
            translate = names["compile"]

            def compiled(pattern: object, flags: int = 0) -> object:
                found = patterns.get((pattern, flags))
                return translate(pattern, flags) if found is None else _sre.compile(pattern, *found)  # type: ignore[operator]

            return {"compile": compiled}
        return {}

    def content(self, begin: int, size: int) -> memoryview:
        """Return a module's content; positions after the end of `modules.bin` are in `rest.bin`."""
        if begin < len(self.modules):
            return self.modules[begin : begin + size]
        if not self.rest:
            self.rest = memoryview(self.fetch_rest())
        begin -= len(self.modules)
        return self.rest[begin : begin + size]

    def fetch_rest(self) -> bytes:
        """Fetch `rest.bin`.

        Raises:
            ImportError: it cannot be loaded, or is that of another build.
        """
        import zlib

        from js import XMLHttpRequest  # type: ignore[import-not-found]  # an import cannot wait for fetch

        request = XMLHttpRequest.new()
        request.open("GET", "rest.bin", False)
        request.responseType = "arraybuffer"
        try:
            request.send()
            content = zlib.decompress(request.response.to_bytes(), 31)
        except Exception as error:
            raise ImportError("Cannot load rest.bin, a file of this page") from error
        if zlib.crc32(content) != self.rest_checksum:
            raise ImportError("This page has been updated")
        return content


with open(f"{site.getsitepackages()[0]}/modules.bin", "rb") as opened:
    sys.meta_path.insert(0, PackedModules(opened.read()))
