// The worker starts before the rest of the page is loaded: Python needs the longest.
window.started = new Worker("worker.js", { type: "module" });
