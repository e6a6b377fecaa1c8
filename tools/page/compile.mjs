// node compile.mjs PYODIDE PACKAGES.zip PYTHON_STDLIB.zip CHOICES.json
// Runs compile.py in Pyodide: it replaces the two archives by those that the page serves. Also writes the choices of
// the form.
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [folder, packages, library, choices] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(path.join(folder, "pyodide.mjs")).href);
const source = (name) => fs.readFileSync(new URL(name, import.meta.url), "utf8");
const boot = "import sys; sys.boot_modules = tuple(sys.modules)";
const fsInit = async (files, { sitePackages }) => files.writeFile(`${sitePackages}/sitecustomize.py`, boot);
const python = await loadPyodide({ indexURL: `${folder}/`, fsInit });
python.FS.writeFile("/packages.zip", fs.readFileSync(packages));
python.FS.writeFile("/library.zip", fs.readFileSync(library));
python.FS.writeFile("/sitecustomize.py", source("sitecustomize.py"));
fs.writeFileSync(choices, python.runPython(source("compile.py")));
fs.writeFileSync(packages, python.FS.readFile("/packages.zip.new"));
fs.writeFileSync(library, python.FS.readFile("/library.zip.new"));
