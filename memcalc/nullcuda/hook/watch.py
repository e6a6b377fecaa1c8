"""Runs inside each Python process of a watched command: gives torch the null device, and reports what it held.

Nothing happens until the program imports torch. Then: the stub libraries are loaded before torch looks for NVIDIA's;
torch is told what this device cannot do; steps are counted; and when the process ends, or is told to end, a report is
written. Settings come from environment variables (memcalc/nullcuda/launcher.py); the program's own code is not
changed, and it can see that it is on a null device by MEMCALC_NULL_CARD.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import importlib.machinery
import importlib.util
import json
import os
import signal
import sys
import time
import types
from typing import Any, Callable, Optional  # noqa: UP035 -- runs on Python 3.9 too

# ruff: noqa: INP001 -- a folder for PYTHONPATH, no package
# ruff: noqa: PTH105, PTH118, PTH123, PTH208 -- pathlib would cost every start of a Python 5 ms
# ruff: noqa: UP045, B905 -- Python 3.9 has neither X | None nor zip(strict=)

FOLDER = os.environ["MEMCALC_NULL_DEVICE"]  # of the stub libraries
REPORTS = os.environ.get("MEMCALC_NULL_REPORTS")  # folder of the reports
STEPS = int(os.environ.get("MEMCALC_NULL_STEPS") or 0)  # stop after so many; 0: never
SKIP_INIT = os.environ.get("MEMCALC_NULL_SKIP_INIT") == "1"
HISTORY = os.environ.get("MEMCALC_NULL_HISTORY") == "1"

REPORT_EVERY = 1.0  # seconds between the reports that a process writes while it runs, for the case that it is killed
HISTORY_ENTRIES = 1_000_000  # events of the allocator; older ones are forgotten
LARGE = 1 << 20  # elements: CPU tensors that --skip-init leaves as they are when they are to be filled at random
LAST_GRAPH = 0.05  # seconds that autograd's thread gets at the end
LARGEST_SHOWN = 25  # allocations at the peak

COUNTS = ("launches", "reads", "small_reads", "read_bytes", "communicators", "communicator_bytes")


class Watch:
    """What is known of this process."""

    def __init__(self) -> None:
        self.torch: Any = None
        self.library: Any = None
        self.forget()

    def forget(self) -> None:
        """Start anew, as a forked process does."""
        self.started = time.time()
        self.cuda_process: Optional[int] = None  # the process in which CUDA was initialised
        self.peaks: dict[int, dict[str, int]] = {}  # by device: what the program's own resets would lose
        self.steps: dict[int, int] = {}  # by optimizer
        self.ranks: dict[str, int] = {}
        self.failure: Optional[tuple[str, str]] = None
        self.stopped = False
        self.reported = 0.0

    # ---- what happens around the import of torch

    def load_libraries(self) -> None:
        """By their sonames, and before torch: the loader then takes these for the ones that torch needs."""
        self.library = ctypes.CDLL(os.path.join(FOLDER, "libmemcalcnull.so"), ctypes.RTLD_GLOBAL)
        self.library.null_most.restype = ctypes.c_size_t
        self.library.null_unmodelled_name.restype = ctypes.c_char_p
        for name in sorted(os.listdir(FOLDER)):
            if name.endswith(".null"):
                ctypes.CDLL(os.path.join(FOLDER, name), ctypes.RTLD_GLOBAL)

    def arrange(self, torch: Any) -> None:
        """Called when torch has been imported."""
        self.torch = torch
        # cuDNN plans attention by itself, with kernels that it compiles: stubs cannot stand in for that. It stays off
        # when a program puts it among several (torch.nn.attention.sdpa_kernel): the others are left then.
        switch = torch._C._set_sdp_use_cudnn  # noqa: SLF001 -- what torch.backends.cuda.enable_cudnn_sdp calls
        torch._C._set_sdp_use_cudnn = lambda _: switch(False)  # noqa: SLF001 -- likewise
        switch(False)
        torch.cuda._lazy_call(self.begin)  # noqa: SLF001 -- what torch itself calls to be told
        self.keep_peaks()
        optimizers = importlib.import_module("torch.optim.optimizer")  # torch.optim deletes the name
        optimizers.register_optimizer_step_post_hook(self.after_step)
        if SKIP_INIT:
            skip_initialization(torch)
        if REPORTS:
            self.report_at_the_end()

    def begin(self) -> None:
        """CUDA is initialised in this process."""
        self.cuda_process = os.getpid()
        if HISTORY:
            self.torch.cuda.memory._record_memory_history(  # noqa: SLF001 -- how PyTorch's own guide asks for it
                enabled="all", context="alloc", stacks="python", max_entries=HISTORY_ENTRIES
            )

    def keep_peaks(self) -> None:
        """A program that resets the allocator's peaks must not reset ours."""
        for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
            original = getattr(self.torch._C, name, None)  # noqa: SLF001 -- what torch.cuda.reset_* call
            if original is None:
                continue

            def reset(device: int, original: Callable[[int], Any] = original) -> Any:
                self.read_peaks()
                return original(device)

            setattr(self.torch._C, name, reset)  # noqa: SLF001 -- likewise

    def report_at_the_end(self) -> None:
        """However the process ends, as far as Python learns of it."""
        atexit.register(self.leave)
        os.register_at_fork(after_in_child=self.forget)
        from multiprocessing import util

        # Forked workers of multiprocessing leave without atexit, through finalizers of their own.
        util.register_after_fork(self, lambda watch: util.Finalize(None, watch.report, exitpriority=0))
        former = sys.excepthook

        def note(kind: type[BaseException], error: BaseException, trace: Optional[types.TracebackType]) -> None:
            self.failure = (kind.__name__, str(error))
            former(kind, error, trace)

        sys.excepthook = note
        try:
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self.terminate)
        except ValueError:
            pass  # torch was imported by a thread, which cannot set handlers

    def leave(self) -> None:
        """The program has come to its end."""
        self.report()
        # PyTorch's autograd thread may still be letting go of the last graph, and aborts the process if Python ends
        # meanwhile. With real kernels to wait for, it is long done by then.
        time.sleep(LAST_GRAPH)

    def terminate(self, number: int, _: Optional[types.FrameType]) -> None:
        """Report, then end as if there were no handler."""
        self.report()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # ---- what happens while the program runs

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Called after each step of any optimizer."""
        steps = self.steps[id(optimizer)] = self.steps.get(id(optimizer), 0) + 1
        if REPORTS and time.time() - self.reported > REPORT_EVERY:
            self.report(allocations=False)
        if STEPS and steps >= STEPS:
            self.stopped = True
            self.report()
            sys.stdout.flush()
            sys.stderr.flush()
            # No clean-up of the program's own: at its end it would write checkpoints of zeros.
            os._exit(0)

    def read_peaks(self) -> None:
        """The allocator's counters, where they are higher than what was seen before."""
        if self.cuda_process != os.getpid():
            return
        for device in range(self.torch.cuda.device_count()):
            stats = self.torch.cuda.memory_stats_as_nested_dict(device)
            if not stats:
                continue
            peaks = self.peaks.setdefault(device, {})
            for name in ("allocated_bytes", "reserved_bytes", "requested_bytes"):
                figures = stats.get(name, {}).get("all", {})
                peaks[name] = max(peaks.get(name, 0), figures.get("peak", 0))
                peaks["current_" + name] = figures.get("current", 0)
            peaks["ooms"] = stats.get("num_ooms", 0)
            peaks["retries"] = stats.get("num_alloc_retries", 0)
            peaks["device_bytes"] = self.library.null_most(device)

    def read_ranks(self) -> None:
        """Who this process is among its peers."""
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            if os.environ.get(name, "").isdecimal():
                self.ranks[name.lower()] = int(os.environ[name])
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            self.ranks.update(rank=distributed.get_rank(), world_size=distributed.get_world_size())

    # ---- the report

    def report(self, *, allocations: bool = True) -> None:
        """Write what is known so far, in place of what was written before."""
        try:
            self.reported = time.time()
            self.read_peaks()
            self.read_ranks()
            path = os.path.join(str(REPORTS), f"{os.getpid()}-{self.started:.6f}.json")
            with open(path + ".part", "w") as file:
                json.dump(self.document(allocations=allocations), file)
            os.replace(path + ".part", path)
        except Exception as error:  # noqa: BLE001 -- the program that is watched must not fail by it
            sys.stderr.write(f"memcalc: no report of process {os.getpid()}: {error!r}\n")

    def document(self, *, allocations: bool) -> dict[str, Any]:
        """The report."""
        numbers = (ctypes.c_longlong * len(COUNTS))()
        self.library.null_read_counts(numbers)
        return {
            "pid": os.getpid(),
            "started": self.started,
            "arguments": list(getattr(sys, "argv", [])),
            "torch": self.torch.__version__,
            "python": sys.version.split()[0],
            "ranks": self.ranks,
            "steps": max(self.steps.values(), default=0),
            "stopped": self.stopped,
            "failure": self.failure,
            "cuda": self.cuda_process == os.getpid(),
            "devices": {str(device): peaks for device, peaks in self.peaks.items()},
            "counts": dict(zip(COUNTS, numbers)),
            "unmodelled": self.unmodelled(),
            "allocations": largest_allocations(self.torch) if allocations and HISTORY and self.peaks else [],
        }

    def unmodelled(self) -> list[str]:
        """Functions that were called and that the stubs do not model."""
        names: list[str] = []
        while (name := self.library.null_unmodelled_name(len(names))) is not None:
            names.append(name.decode())
        return names


def skip_initialization(torch: Any) -> None:
    """Weights stay as the system hands out their memory: untouched pages, which cost none."""

    def unchanged(tensor: Any, *_: Any, **__: Any) -> Any:
        return tensor

    init = torch.nn.init
    names = [name for name in vars(init) if name.endswith("_") and not name.startswith("_")]
    helpers = [name for name in vars(init) if name.startswith("_no_grad_")]
    for name in names + helpers:
        original = getattr(init, name)
        setattr(init, name, unchanged)
        for module in list(sys.modules.values()):  # who took the function by name before
            if getattr(module, "__name__", "").startswith("torch.nn") and vars(module).get(name) is original:
                setattr(module, name, unchanged)
    for name in ("normal_", "uniform_"):  # how models fill weights without torch.nn.init
        original = getattr(torch.Tensor, name)

        def fill(tensor: Any, *rest: Any, original: Callable[..., Any] = original, **named: Any) -> Any:
            large = tensor.device.type == "cpu" and tensor.numel() > LARGE
            return tensor if large else original(tensor, *rest, **named)

        setattr(torch.Tensor, name, fill)


def largest_allocations(torch: Any) -> list[dict[str, Any]]:
    """What was alive at each device's peak, by the line of the program that asked for it, largest first."""
    found = []
    for device, events in enumerate(torch.cuda.memory._snapshot()["device_traces"]):  # noqa: SLF001 -- as above
        alive: dict[int, Any] = {}
        at_peak: list[Any] = []
        level = peak = 0
        rising = False
        for event in [*events, None]:
            action = event["action"] if event else "free_requested"
            if action == "alloc":
                alive[event["addr"]] = event
                level += event["size"]
                rising = True
            elif action == "free_requested":
                if rising and level > peak:  # a summit: copied only where it is higher than all before
                    peak, at_peak = level, list(alive.values())
                rising = False
                gone = alive.pop(event["addr"], None) if event else None
                level -= gone["size"] if gone else 0
        places: dict[str, list[int]] = {}
        for event in at_peak:
            place = places.setdefault(place_of(event.get("frames", ())), [0, 0])
            place[0] += event["size"]
            place[1] += 1
        ranked = sorted(places.items(), key=lambda item: -item[1][0])[:LARGEST_SHOWN]
        found += [{"device": device, "where": where, "bytes": size, "count": n} for where, (size, n) in ranked]
    return found


def place_of(frames: Any) -> str:
    """The innermost line that is not torch's own, nor of any installed package if there is one outside of them."""
    lines = [frame for frame in frames if frame["filename"].endswith(".py") or frame["filename"].startswith("<")]
    own = [frame for frame in lines if f"{os.sep}torch{os.sep}" not in frame["filename"]]
    users = [frame for frame in own if "site-packages" not in frame["filename"] and "<" not in frame["filename"]]
    for frame in users or own or lines:
        return f"{frame['filename']}:{frame['line']} {frame['name']}"
    return "backward"  # autograd's own threads have no Python frames


class Finder:
    """First on sys.meta_path: finds torch by the other finders, and puts its own steps around the import."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.asking = False

    def find_spec(self, name: str, *_: Any, **__: Any) -> Optional[importlib.machinery.ModuleSpec]:
        """Only torch is found here. Programs also look for it without importing it, so this may happen often."""
        if name != "torch" or self.asking:
            return None
        self.asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asking = False
        if spec is None or spec.loader is None:
            return spec
        original = spec.loader.exec_module

        def execute(module: types.ModuleType) -> None:
            sys.meta_path.remove(self)  # once is enough
            self.watch.load_libraries()
            original(module)
            self.watch.arrange(module)

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder(Watch()))
