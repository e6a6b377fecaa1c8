// node compile.mjs PYODIDE PACKAGES.zip PYTHON_STDLIB.zip CHOICES.json
// Answers requests in Pyodide, and replaces the sources of the modules that they load by byte code of this interpreter,
// which halves the time to the first answer; all other modules stay sources, which are smaller. Also writes the choices
// of the form.
import fs from "node:fs";
import path from "node:path";
import { pathToFileURL } from "node:url";

const [folder, packages, library, choices] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(path.join(folder, "pyodide.mjs")).href);
const python = await loadPyodide({ indexURL: `${folder}/` });
python.FS.writeFile("/packages.zip", fs.readFileSync(packages));
python.FS.writeFile("/library.zip", fs.readFileSync(library));
const offered = python.runPython(`
import importlib._bootstrap_external as external, json, site, sys, zipfile
folder = site.getsitepackages()[0]
zipfile.ZipFile("/packages.zip").extractall(folder)
from memcalc.startup import start_quickly
start_quickly()
from memcalc.page.engine import parts
from memcalc.page.form import choices
run = {"model": "gpt2", "gpu": "h100-80gb", "gpus": "2"}
llama = {"model": "meta-llama/Llama-3.1-8B", "gpu": "t4"}
config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4,
          "num_hidden_layers": 2, "vocab_size": 512}
runs = [run, *(llama | {"fields": fields} for fields in (
    {"parallelism.pipeline_parallel": "2"}, {"training.implementation": "huggingface", "training.finetune": "lora"}))]
runs += [llama | {"gpus": "8", "fields": {"parallelism.zero_stage": "3"}}, {"text": json.dumps(config), "gpu": "t4"}]
requests = [{"kind": "estimate", "run": each} for each in runs]
requests += [{"kind": "diff", "run": run, "other": run}, {"kind": "fit", "run": run, "maximize": "micro_batch_size"}]
for request in requests:
    for part in map(json.loads, parts(json.dumps(request))):
        assert part["part"] != "error", part
offered = json.dumps(choices())
loaded = {getattr(module, "__file__", None) or "" for module in sys.modules.values()}
for archive, prefix in (("/packages.zip", folder + "/"), ("/library.zip", "")):
    with zipfile.ZipFile(archive) as given, zipfile.ZipFile(archive + ".new", "w") as made:
        for name in given.namelist():
            content = given.read(name)
            wanted = prefix + name in loaded if prefix else any(file.endswith(".zip/" + name) for file in loaded)
            if name.endswith(".py") and wanted:
                # memcalc keeps its assertions; other packages lose theirs and their docstrings, as with python -OO.
                code = compile(content, name, "exec", dont_inherit=True, optimize=0 if name.startswith("memcalc/") else 2)
                name, content = name + "c", bytes(external._code_to_timestamp_pyc(code, 0, 0))
            made.writestr(name, content)
offered
`);
fs.writeFileSync(packages, python.FS.readFile("/packages.zip.new"));
fs.writeFileSync(library, python.FS.readFile("/library.zip.new"));
fs.writeFileSync(choices, offered);
