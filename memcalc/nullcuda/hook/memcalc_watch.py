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
import re
import signal
import sys
import threading
import time
import types
from typing import Any, Callable, Optional  # noqa: UP035 -- runs on Python 3.9 too

# ruff: noqa: INP001 -- a folder for PYTHONPATH, no package
# ruff: noqa: PTH105, PTH108, PTH110, PTH118, PTH123, PTH208 -- pathlib would cost every start of a Python 5 ms
# ruff: noqa: UP045, B905 -- Python 3.9 has neither X | None nor zip(strict=)

# By name: they lie beside this file, on PYTHONPATH, and belong to no package.
checkpoints, compiler, groups, masks, objects, peak, values, weights = (
    importlib.import_module(f"memcalc_{name}")
    for name in ("checkpoints", "compiler", "groups", "masks", "objects", "peak", "values", "weights")
)

FOLDER = os.environ["MEMCALC_NULL_DEVICE"]  # of the stub libraries
REPORTS = os.environ.get("MEMCALC_NULL_REPORTS")  # folder of the reports
STEPS = int(os.environ.get("MEMCALC_NULL_STEPS") or 0)  # stop after so many; 0: never
SKIP_INIT = os.environ.get("MEMCALC_NULL_SKIP_INIT") == "1"
RANDOM_WEIGHTS = os.environ.get("MEMCALC_NULL_RANDOM_WEIGHTS") == "1"
HISTORY = os.environ.get("MEMCALC_NULL_HISTORY") == "1"
ALONE = os.environ.get("MEMCALC_NULL_ALONE") == "1"  # one rank of many
WORST_ROUTING = os.environ.get("MEMCALC_NULL_ROUTING") == "worst-case"

RESERVE = "reserve"  # file in it that takes the room of some reports
REPORT_EVERY = 0.5  # seconds between the reports that a process writes while it runs, for the case that it is killed
HISTORY_ENTRIES = 1_000_000  # events of the allocator; older ones are forgotten
# NCCL's watchdog looks ten times per second which collectives are over, and only then are their tensors freed. A real
# step takes longer than that; without a pause the first buckets of DDP would be kept next to those of the next step.
FIRST_STEPS, WATCHDOG = 2, 0.25  # seconds after each of the first optimizer steps, in a process with communicators
LAST_GRAPH = 0.05  # seconds that autograd's thread gets at the end

COUNTS = ("launches", "reads", "small_reads", "read_bytes", "communicators", "communicator_bytes")


def write(path: str, text: str) -> None:
    """Write a report whole, in place of the one before."""
    with open(path + ".part", "w") as file:
        file.write(text)
    os.replace(path + ".part", path)


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
        self.reporting = threading.Lock()
        self.ended = threading.Event()

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
        if torch.version.cuda is None:
            return  # another environment's: a build for the CPU has no card to find
        self.torch = torch
        # cuDNN plans attention by itself, with kernels that it compiles: stubs cannot stand in for that. It stays off
        # when a program puts it among several (torch.nn.attention.sdpa_kernel): the others are left then.
        # Older releases have no such switch.
        switch = getattr(torch._C, "_set_sdp_use_cudnn", None)  # noqa: SLF001 -- what torch.backends.cuda switches by
        if switch is not None:
            torch._C._set_sdp_use_cudnn = lambda _: switch(False)  # noqa: SLF001 -- likewise
            switch(False)
        masks.take_masks_as_full(torch, self.library)
        values.begin(torch, self.library, FOLDER, same_for_all=WORST_ROUTING)
        torch.cuda._lazy_call(self.begin)  # noqa: SLF001 -- what torch itself calls to be told
        self.keep_peaks()
        optimizers = importlib.import_module("torch.optim.optimizer")  # torch.optim deletes the name
        optimizers.register_optimizer_step_post_hook(self.after_step)
        if torch.distributed.is_available():
            collectives = importlib.import_module("torch.distributed.distributed_c10d")
            objects.compute_sizes_on_the_host(collectives, self.library)
            if ALONE:
                groups.leave_alone(torch, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
        if SKIP_INIT:
            weights.skip_initialization(torch)
        checkpoints.watch(torch, "save", place=1, initialized=torch.cuda.is_initialized)
        if REPORTS:
            self.report_at_the_end()

    def watch_safetensors(self, module: Any) -> None:
        """Called when safetensors.torch has been imported."""
        if self.torch is not None:
            checkpoints.watch(module, "save_file", place=1, initialized=self.torch.cuda.is_initialized)

    def count_fake_groups(self, _: Any) -> None:
        """Called when PyTorch's fake process group has been imported."""
        if self.torch is not None and not ALONE:  # a rank alone has fakes in place of Gloo's
            groups.count_fake_groups(self.torch, self.library)

    def choose_kernels(self) -> None:
        """Which of the architectures that torch was compiled for the card would take: see src/device.c."""
        flags = self.torch._C._cuda_getArchFlags() or ""  # noqa: SLF001 -- what torch.cuda.get_arch_list reads
        known = sorted(int(version) for version in re.findall(r"\bsm_(\d+)", flags))
        card = self.library.null_kernel_version()
        older = [version for version in known if version <= card]
        if known:  # a card older than all of them could not run this torch: PyTorch warns of that itself
            self.library.null_set_kernel_version(older[-1] if older else known[0])

    def begin(self) -> None:
        """CUDA is initialised in this process."""
        self.cuda_process = os.getpid()
        self.choose_kernels()  # not before: asking PyTorch for its architectures forbids CUDA after a fork
        if REPORTS:
            self.library.null_keep_books(f"{self.path()}.books".encode())
            # In the books at once: the program may catch the error, and be killed before the next report.
            self.torch._C._cuda_attach_out_of_memory_observer(  # noqa: SLF001 -- as PyTorch's guide to snapshots does
                lambda device, *_: self.library.null_note_oom(device)
            )
            self.report(allocations=False)
            threading.Thread(target=self.report_while_running, name="memcalc", daemon=True).start()
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

    def report_while_running(self) -> None:
        """Figures are on disk as they arise: the process may be killed."""
        ended = self.ended
        while not ended.wait(REPORT_EVERY):
            self.report(allocations=False)

    def leave(self) -> None:
        """The program has come to its end."""
        self.ended.set()
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
        self.library.null_note_steps(ctypes.c_int64(max(self.steps.values())))
        if steps <= FIRST_STEPS and self.counts()["communicators"]:
            time.sleep(WATCHDOG)
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

    def path(self) -> str:
        """Where this process's figures are, without what tells its files apart."""
        return os.path.join(str(REPORTS), f"{os.getpid()}-{self.started:.6f}")

    def report(self, *, allocations: bool = True) -> None:
        """Write what is known so far, in place of what was written before."""
        # A signal's handler may find the lock taken by what it interrupted, and must not wait for it.
        taken = self.reporting.acquire(timeout=1.0)
        try:
            self.read_peaks()
            self.read_ranks()
            path = f"{self.path()}.json"
            text = json.dumps(self.document(allocations=allocations))
            try:
                write(path, text)
            except OSError:  # the disk is full: there is room that was kept for this
                open(path + ".lost", "w").close()
                os.unlink(os.path.join(str(REPORTS), RESERVE))
                write(path, text)
            if os.path.exists(path + ".lost"):
                os.unlink(path + ".lost")
        except Exception as error:  # noqa: BLE001 -- the program that is watched must not fail by it
            sys.stderr.write(f"memcalc: no report of process {os.getpid()}: {error!r}\n")
        finally:
            if taken:
                self.reporting.release()

    def counts(self) -> dict[str, int]:
        """What the device has counted, by name."""
        numbers = (ctypes.c_longlong * len(COUNTS))()
        self.library.null_read_counts(numbers)
        return dict(zip(COUNTS, numbers))

    def document(self, *, allocations: bool) -> dict[str, Any]:
        """The report."""
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
            "counts": self.counts(),
            "checkpoints": {"count": checkpoints.count, "first": checkpoints.first},
            "masks": masks.count,
            "values": values.library is not None,
            "choices": values.choices(),
            "unknown_reads": [{"where": where, "count": count} for where, count in values.lines.items()],
            "unmodelled": self.unmodelled(),
            "allocations": peak.largest_allocations(self.torch) if allocations and HISTORY and self.peaks else [],
        }

    def largest(self) -> list[dict[str, Any]]:
        """What was alive at the peak, if it was to be found."""
        return peak.largest_allocations(self.torch) if HISTORY and self.peaks else []

    def unmodelled(self) -> list[str]:
        """Functions that were called and that the stubs do not model."""
        names: list[str] = []
        while (name := self.library.null_unmodelled_name(len(names))) is not None:
            names.append(name.decode())
        return names


class Finder:
    """First on sys.meta_path: finds some modules by the other finders, and puts steps of ours around their import."""

    def __init__(self, around: dict[str, tuple[Callable[[], None], Callable[[Any], None]]]) -> None:
        self.around = around  # by module: what is done before it is executed, and after
        self.asking = ""

    def find_spec(self, name: str, *_: Any, **__: Any) -> Optional[importlib.machinery.ModuleSpec]:
        """Programs also look for torch without importing it, so this may happen often for one module."""
        if name not in self.around or self.asking == name:
            return None
        self.asking = name
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asking = ""
        if spec is None or spec.loader is None:
            return spec
        original = spec.loader.exec_module

        def execute(module: types.ModuleType) -> None:
            before, after = self.around.pop(name, (nothing, nothing))  # once is enough
            before()
            original(module)
            after(module)

        spec.loader.exec_module = execute  # type: ignore[method-assign]
        return spec


def nothing(*_: Any) -> None:
    """Do nothing."""


watch = Watch()
AROUND: dict[str, tuple[Callable[[], None], Callable[[Any], None]]] = {
    "torch": (watch.load_libraries, watch.arrange),
    "torch._compile": (nothing, compiler.spare_disabled),
    "torch.optim.optimizer": (nothing, compiler.spare_steps),
    "torch._dynamo": (compiler.begin, nothing),
    "safetensors.torch": (nothing, watch.watch_safetensors),
    "torch.testing._internal.distributed.fake_pg": (nothing, watch.count_fake_groups),
}
if ALONE:
    AROUND["torch.distributed.pipelining.stage"] = (nothing, groups.vote_alone)
if RANDOM_WEIGHTS:
    AROUND["transformers.modeling_utils"] = (nothing, weights.replace_from_pretrained)
sys.meta_path.insert(0, Finder(AROUND))
