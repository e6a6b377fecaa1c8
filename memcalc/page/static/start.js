// Start the worker before the rest of the page is loaded: Python takes longest.
window.started = new Worker("worker.js", { type: "module" });
