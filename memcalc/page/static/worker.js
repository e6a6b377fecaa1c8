// memcalc in a web worker: Pyodide, one archive of packages, one function. A request is answered part by part.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const DECODER = new TextDecoder();

const times = { begin: performance.timeOrigin + performance.now() };
const note = (name) => { times[name] = performance.timeOrigin + performance.now() - times.begin; };

/** A gzipped file, unpacked by the browser while it arrives: some static hosts do not compress what they send. */
async function unpacked(name) {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name}: HTTP status ${response.status}`);
  return new Response(response.body.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

/** Write the files of an archive: the length of its index, the index (paths and sizes as JSON), and their bytes. */
function extract(python, archive, folder) {
  const bytes = new Uint8Array(archive);
  let at = 4 + new DataView(archive).getUint32(0, true);
  const folders = new Set();
  for (const [path, size] of JSON.parse(DECODER.decode(bytes.subarray(4, at)))) {
    const target = `${folder}/${path}`, parent = target.slice(0, target.lastIndexOf("/"));
    if (!folders.has(parent)) python.FS.mkdirTree(parent);
    folders.add(parent);
    python.FS.writeFile(target, bytes.subarray(at, at += size), { canOwn: true });
  }
}

async function start() {
  const packages = unpacked("packages.bin");
  packages.catch(() => {}); // reported below, when it is awaited
  const library = URL.createObjectURL(new Blob([await unpacked("library.bin")]));
  const python = await loadPyodide({ indexURL: new URL("pyodide/", self.location.href).href, stdLibURL: library });
  URL.revokeObjectURL(library);
  note("python");
  extract(python, await packages, python.runPython("import site; site.getsitepackages()[0]"));
  note("unpacked");
  python.runPython("from memcalc.startup import start_quickly; start_quickly()");
  const engine = python.pyimport("memcalc.page.engine");
  note("imported");
  return engine;
}

const ready = start();
ready.then(() => postMessage({ kind: "ready", times }), (error) => postMessage({ kind: "broken", error: String(error?.message ?? error) }));

let latest = 0;

/** Let messages in that have come meanwhile. */
const pause = () => new Promise((resolve) => {
  const { port1, port2 } = new MessageChannel();
  port1.onmessage = resolve;
  port2.postMessage(0);
});

onmessage = async ({ data: { id, request } }) => {
  latest = id;
  const engine = await ready;
  await pause();
  let begin = performance.now();
  const tell = (text) => postMessage({ kind: "progress", id, text });
  try {
    const parts = engine.parts(JSON.stringify(request), tell);
    while (id === latest) {
      const { value, done } = parts.next();
      if (done) break;
      postMessage({ kind: "part", id, text: value, milliseconds: performance.now() - begin });
      await pause();
      begin = performance.now();
    }
    parts.destroy();
    if (id === latest) postMessage({ kind: "done", id });
  } catch (error) {
    postMessage({ kind: "failed", id, error: String(error?.message ?? error).trim().split("\n").at(-1) });
  }
};
