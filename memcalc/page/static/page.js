// The form, its state in the URL, and the worker that computes. No formula for memory belongs here.
import { make, render, replaceSection } from "./views.js";

const HUB = "https://huggingface.co";
const MOST_CHARACTERS = 1_000_000; // of a config.json from the hub
const PAUSE = 150; // milliseconds after the last key, before the run is computed
const START = { kind: "estimate", model: "llama-3-8b", gpu: "h100-80gb", "training.recipe": "pure", "training.micro_batch_size": "2" };

const choices = JSON.parse(document.getElementById("choices").textContent);
const byId = (id) => document.getElementById(id);
const form = byId("form"), view = byId("view"), status = byId("status"), hub = byId("hub");
const stop = byId("stop"), search = byId("search"), copies = ["copy-command", "copy-yaml", "download"].map(byId);
const fields = choices.blocks.flatMap((block) => block.fields);
const controls = ["model", "text", "gpu", "gpus", "more", "maximize", "minimize"];

let worker, number = 0, waiting, last = null, other = "", kind = "estimate";

// -- the form -------------------------------------------------------------------------------------------------------

function input(field) {
  const id = `field-${field.path}`;
  const hint = field.description ? make("span", { class: "hint", id: `${id}-hint` }, field.description) : null;
  const attributes = { id, name: field.path, "aria-describedby": hint ? `${id}-hint` : null };
  const made = field.kind === "choice"
    ? make("select", attributes, make("option", { value: "" }, "default"), field.values.map((value) => make("option", { value }, value)))
    : make("input", { ...attributes, type: "text", inputmode: field.kind === "number" ? "numeric" : null, autocomplete: "off", placeholder: "default" });
  return make("div", { class: "field" }, make("label", { for: id }, field.title), made, hint);
}

function buildForm() {
  byId("models").replaceChildren(...choices.models.map((name) => make("option", { value: name })));
  form.elements.gpu.append(...choices.gpus.map(({ name, label }) => make("option", { value: name }, label)));
  const [open, ...others] = choices.blocks;
  byId("first").append(...open.fields.map(input));
  byId("others").append(...others.map((block) => make("details", {}, make("summary", {}, block.title), make("div", { class: "fields" }, block.fields.map(input)))));
}

const value = (name) => form.elements[name].value;

function run() {
  const given = Object.fromEntries(fields.map(({ path }) => [path, value(path).trim()]).filter(([, text]) => text));
  return { model: value("model"), text: value("text"), gpu: value("gpu"), gpus: value("gpus"), more: value("more"), fields: given };
}

// -- the state in the URL ----------------------------------------------------------------------------------------------
// After its "#", which browsers do not send to a server.

function words() {
  const found = new URLSearchParams({ kind });
  for (const name of [...controls, ...fields.map(({ path }) => path)]) if (value(name).trim()) found.set(name, value(name).trim());
  if (value("text").trim()) found.delete("model");
  return found;
}

function remember() {
  const found = words();
  if (other) found.set("other", other);
  history.replaceState(null, "", `#${found}`);
}

function runOfWords(text) {
  const given = new URLSearchParams(text);
  const found = Object.fromEntries(fields.map(({ path }) => [path, given.get(path)]).filter(([, each]) => each));
  const [model, pasted, gpu, gpus, more] = ["model", "text", "gpu", "gpus", "more"].map((name) => given.get(name) ?? "");
  return { model, text: pasted, gpu, gpus, more, fields: found };
}

function recall() {
  const given = new URLSearchParams(location.hash.slice(1) || START);
  for (const name of [...controls, ...fields.map(({ path }) => path)]) set(form.elements[name], given.get(name) ?? "");
  for (const opened of form.querySelectorAll("details")) {
    opened.open ||= [...opened.querySelectorAll("input, select, textarea")].some((each) => each.value);
  }
  other = given.get("other") ?? "";
  choose(["estimate", "fit", "diff"].includes(given.get("kind")) ? given.get("kind") : "estimate");
}

function set(element, text) {
  if (element.tagName === "SELECT" && text && ![...element.options].some((option) => option.value === text)) {
    element.append(make("option", { value: text }, text)); // a value that the form does not offer: memcalc accepts or rejects it
  }
  element.value = text;
}

function choose(chosen) {
  kind = chosen;
  for (const button of document.querySelectorAll("[data-kind]")) button.setAttribute("aria-pressed", String(button.dataset.kind === kind));
  byId("fit-options").hidden = kind !== "fit";
  byId("diff-options").hidden = kind !== "diff";
  byId("a-run").textContent = other ? title(runOfWords(other)) : "none yet; press “Keep as A”, then change the form";
}

const title = (asked) => [asked.text ? "pasted configuration" : asked.model, asked.gpu, asked.gpus && `${asked.gpus} GPUs`,
  ...Object.entries(asked.fields).map(([path, text]) => `${path.split(".").at(-1)}=${text}`), ...asked.more.split("\n")].filter(Boolean).join(", ");

// -- the worker --------------------------------------------------------------------------------------------------------

function startWorker() {
  worker?.terminate();
  worker = window.started ?? new Worker("worker.js", { type: "module" });
  delete window.started;
  worker.onmessage = ({ data }) => RECEIVERS[data.kind](data);
  worker.onerror = (event) => fail(`Cannot start memcalc: ${event.message ?? "its files could not be loaded"}. Reload the page.`);
}

function ask() {
  clearTimeout(waiting);
  remember();
  hub.hidden = true;
  if (kind === "diff" && !other) return say("Press “Keep as A”, then change the form: it becomes B.", "idle");
  number += 1;
  const request = { kind, run: run() };
  if (kind === "fit") Object.assign(request, { maximize: value("maximize"), minimize: value("minimize") });
  if (kind === "diff") request.other = runOfWords(other);
  say(document.body.dataset.ready ? "Computing…" : "Loading Python…", "busy");
  worker.postMessage({ id: number, request });
}

function askSoon() {
  remember();
  clearTimeout(waiting);
  if (kind !== "fit") { document.body.dataset.state = "typing"; waiting = setTimeout(ask, PAUSE); }
  else say("The form changed. Press Search.", "idle");
}

const RECEIVERS = {
  ready() { document.body.dataset.ready = "yes"; },
  broken({ error }) { fail(`Cannot start memcalc: ${error}. Reload the page.`); },
  progress({ id, text }) { if (id === number) say(text, "busy"); },
  part({ id, text, milliseconds }) {
    if (id !== number) return;
    const part = JSON.parse(text);
    if (part.part === "error") return fail(part.message, part.hub_id);
    if (part.part === "section") return replaceSection(part.section, view);
    if (part.part === "copies") { last = part; byId("copies").hidden = false; return; }
    document.title = `${part.view.title.split(":")[0]} · memcalc`;
    render(part.view, view);
    performance.mark("answer");
    say(`Computed in ${milliseconds.toFixed(0)} ms in this browser.`, "partial", short(part.view));
  },
  done({ id }) { if (id === number && document.body.dataset.state !== "failed") state("done"); },
  unloaded({ id, error }) { if (id === number) fail(`${error.replace("ImportError: ", "")}. Reload the page.`); },
  failed({ id, error }) { if (id === number) { fail(`Bug in memcalc: ${error}. Please report it with the link to this run.`); startWorker(); } },
};

function state(name) {
  document.body.dataset.state = name;
  stop.hidden = name !== "busy" && name !== "partial";
  view.classList.toggle("stale", name === "busy" || name === "failed" || name === "idle");
  for (const button of copies) button.disabled = name === "failed" || name === "idle"; // the result is of another run
}

/** Show a status; screen readers read `answer` out, and phones show it, because the result is below the form. */
function say(text, name, answer = "") {
  status.replaceChildren(answer ? make("span", { class: "short" }, `${answer} `) : "", make("span", {}, text));
  status.className = "";
  state(name);
}

/** Return the verdict of a view, or both verdicts of a comparison. */
function short(view) {
  return view.sections.flatMap((section) => section.kind === "verdict" ? [section.text]
    : section.kind === "views" ? section.views.map((each) => `${each.title}: ${short(each)}`) : []).join(" ");
}

/** Show an error; `missing` is a hub id that the catalogue lacks. */
function fail(message, missing = null) {
  say(message, "failed");
  status.className = "error";
  hub.hidden = missing === null || missing !== value("model").trim();
}

// -- the hub ---------------------------------------------------------------------------------------------------------------

async function fetchConfig() {
  const id = value("model").trim();
  say(`Fetching config.json of ${id}…`, "busy");
  try {
    const response = await fetch(`${HUB}/${id}/resolve/main/config.json`, { credentials: "omit", referrerPolicy: "no-referrer" });
    if (!response.ok) throw new Error(response.status === 401 || response.status === 403
      ? "the model is gated or missing" : `HTTP status ${response.status}`);
    const text = await response.text();
    if (text.length > MOST_CHARACTERS) throw new Error("the file is too large for a config.json");
    set(form.elements.text, text);
    byId("pasted").open = true;
    ask();
  } catch (error) {
    fail(`Cannot fetch config.json of ${id}: ${error.message}. Paste it instead.`, id);
  }
}

// -- copies ----------------------------------------------------------------------------------------------------------------

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
    status.textContent = `Copied ${what}.`;
  } catch {
    const shown = byId("copied");
    shown.value = text;
    shown.hidden = false;
    shown.select();
    status.textContent = `The browser does not allow copying. Below the buttons, ${what} is selected.`;
  }
}

function download() {
  const link = make("a", { href: URL.createObjectURL(new Blob([last.document], { type: "application/json" })), download: `memcalc-${kind}.json` });
  link.click();
  URL.revokeObjectURL(link.href);
}

// -- events ----------------------------------------------------------------------------------------------------------------

form.addEventListener("submit", (event) => { event.preventDefault(); ask(); });
form.addEventListener("input", askSoon);
search.addEventListener("click", (event) => { event.preventDefault(); ask(); });
for (const button of document.querySelectorAll("[data-kind]")) {
  button.addEventListener("click", () => {
    choose(button.dataset.kind);
    if (kind === "fit") { remember(); say("Press Search to find what fits.", "idle"); } else ask();
  });
}
byId("keep").addEventListener("click", () => { other = String(words()); choose("diff"); ask(); });
stop.addEventListener("click", () => { number += 1; startWorker(); say("Stopped.", "idle"); });
hub.addEventListener("click", fetchConfig);
byId("copy-link").addEventListener("click", () => copy(location.href, "the link"));
byId("copy-yaml").addEventListener("click", () => copy(last.yaml, "the YAML"));
byId("copy-command").addEventListener("click", () => copy(last.command, "the command"));
byId("download").addEventListener("click", download);
addEventListener("hashchange", () => { recall(); ask(); }); // a link that is opened in this tab

buildForm();
recall();
startWorker();
ask();
