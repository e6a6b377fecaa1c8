// memcalc in a web worker: Pyodide, an archive of packages, and one function, which answers a request in parts.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const DECODER = new TextDecoder();

/** Fetch a gzipped file and decompress it as it arrives: some static hosts do not compress. */
async function unpacked(name) {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name}: HTTP status ${response.status}`);
  return new Response(response.body.pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
}

/** Write the files of an archive: the length of its index, the index (paths and sizes as JSON), and the bytes. */
function extract(files, archive, folder) {
  const bytes = new Uint8Array(archive);
  let at = 4 + new DataView(archive).getUint32(0, true);
  const folders = new Set(), paths = [];
  for (const [path, size] of JSON.parse(DECODER.decode(bytes.subarray(4, at)))) {
    const target = `${folder}/${path}`, parent = target.slice(0, target.lastIndexOf("/"));
    if (!folders.has(parent)) files.mkdirTree(parent);
    folders.add(parent);
    files.writeFile(target, bytes.subarray(at, at += size), { canOwn: true });
    paths.push(target);
  }
  performance.mark("packages written");
  return paths;
}

/** Compile WebAssembly while it arrives. A browser keeps compiled code in its cache only if it is compiled so. */
const compiled = (name) => WebAssembly.compileStreaming(fetch(name));

/** Start: the interpreter and pydantic's native library are compiled while the archives are decompressed. */
async function start() {
  const interpreter = compiled("pyodide/pyodide.asm.wasm"), native = compiled("pydantic_core.wasm");
  const packages = unpacked("packages.bin"), library = unpacked("library.bin");
  import("./pyodide/pyodide.asm.mjs"); // early: Pyodide imports it later
  for (const each of [interpreter, native, packages, library]) each.catch(() => {}); // Promise.all reports the error
  const indexURL = new URL("pyodide/", self.location.href).href, stdLibURL = `${indexURL}python_stdlib.zip`;
  // Pyodide fetches its standard library, and fetches and compiles its interpreter: it gets the ones from above.
  const { fetch: plainFetch } = self, { instantiateStreaming } = WebAssembly;
  const answers = { [stdLibURL]: async () => new Response(await library), [`${indexURL}pyodide.asm.wasm`]: async () => new Response() };
  self.fetch = (address, options) => answers[address]?.() ?? plainFetch(address, options);
  WebAssembly.instantiateStreaming = async (_, imports) => {
    const module = await interpreter;
    return { module, instance: await WebAssembly.instantiate(module, imports) };
  };
  let paths;
  const fsInit = async (files, { sitePackages }) => { paths = extract(files, await packages, sitePackages); };
  const [python, compiledNative] = await Promise.all([loadPyodide({ indexURL, stdLibURL, fsInit }), native, interpreter, packages, library]);
  Object.assign(WebAssembly, { instantiateStreaming });
  self.fetch = plainFetch;
  // Emscripten's plug-in for native libraries: the import finds this one loaded, and its file may be empty.
  const path = paths.find((each) => each.endsWith(".so"));
  await python._module.preloadPlugins.find((each) => each.canHandle(path)).handle(compiledNative, path);
  performance.mark("Python started");
  python.runPython("from memcalc.startup import start_quickly; start_quickly()");
  const engine = python.pyimport("memcalc.page.engine");
  performance.mark("memcalc imported");
  return engine;
}

const ready = start();
ready.then(() => postMessage({ kind: "ready" }), (error) => postMessage({ kind: "broken", error: String(error?.message ?? error) }));

let latest = 0, prefetched = false;

/** Fetch the modules that estimates do not need, which an import then finds in the cache of the browser. */
function prefetch() {
  if (!prefetched) fetch("rest.bin", { priority: "low" }).catch(() => {});
  prefetched = true;
}

/** Let the worker receive messages. */
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
    prefetch();
  } catch (error) {
    const kind = error?.type === "ImportError" ? "unloaded" : "failed";
    postMessage({ kind, id, error: String(error?.message ?? error).trim().split("\n").at(-1) });
  }
};
