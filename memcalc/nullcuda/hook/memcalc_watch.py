"""Hook inside each Python process of a dry run: gives torch the null device, and reports the process's memory.

Nothing happens until the program imports torch. Then the stub libraries are loaded before torch looks for NVIDIA's,
features that the device lacks are switched off, and steps are counted. When the process ends, or gets a signal, a
report is written. Settings come from environment variables (memcalc/nullcuda/launcher.py). The program's own code is
not changed; MEMCALC_NULL_CARD is set for programs on a null device.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import importlib.machinery
import importlib.util
import itertools
import json
import os
import re
import signal
import sys
import threading
import time
import types
from typing import Any, Callable, Optional  # noqa: UP035 -- for Python 3.9

# ruff: noqa: INP001 -- a directory on PYTHONPATH, not a package
# ruff: noqa: PTH105, PTH108, PTH110, PTH118, PTH123, PTH208 -- pathlib costs 5 ms per start of Python
# ruff: noqa: UP045, B905 -- Python 3.9 has neither X | None nor zip(strict=)

# Imported by name: the files are next to this one, on PYTHONPATH, and belong to no package.
checkpoints, compiler, groups, masks, objects, peak, values, weights = (
    importlib.import_module(f"memcalc_{name}")
    for name in ("checkpoints", "compiler", "groups", "masks", "objects", "peak", "values", "weights")
)

FOLDER = os.environ["MEMCALC_NULL_DEVICE"]  # directory of the stub libraries
REPORTS = os.environ.get("MEMCALC_NULL_REPORTS")  # directory of the reports
STEPS = int(os.environ.get("MEMCALC_NULL_STEPS") or 0)  # number of steps after which the process ends; 0: never
SKIP_INIT = os.environ.get("MEMCALC_NULL_SKIP_INIT") == "1"
RANDOM_WEIGHTS = os.environ.get("MEMCALC_NULL_RANDOM_WEIGHTS") == "1"
HISTORY = os.environ.get("MEMCALC_NULL_HISTORY") == "1"
ALONE = os.environ.get("MEMCALC_NULL_ALONE") == "1"  # one rank of a multi-rank job
WORST_ROUTING = os.environ.get("MEMCALC_NULL_ROUTING") == "worst-case"

RESERVE = "reserve"  # file in REPORTS that reserves disk space for some reports
REPORT_EVERY = 0.5  # seconds between intermediate reports, in case the process is killed
HISTORY_ENTRIES = 1_000_000  # events of the allocator; older ones are dropped
# NCCL's watchdog checks ten times per second which collectives are complete, and only then their tensors are freed. A
# real step takes longer; without a pause the first buckets of DDP would still be live in the next step.
FIRST_STEPS, WATCHDOG = 2, 0.25  # seconds after each of the first optimizer steps, in a process with communicators
LAST_GRAPH = 0.05  # seconds for autograd's thread at the end

COUNTS = ("launches", "reads", "small_reads", "read_bytes", "communicators", "communicator_bytes")
PARTS = itertools.count()  # number of the next file of a report


def write(path: str, text: str) -> None:
    """Write a complete report in place of the previous one; a signal handler may write another one in between."""
    part = f"{path}.{next(PARTS)}.part"
    with open(part, "w") as file:
        file.write(text)
    os.replace(part, path)


class Watch:
    """State of this process."""

    def __init__(self) -> None:
        self.torch: Any = None
        self.library: Any = None
        self.forget()

    def forget(self) -> None:
        """Reset the state, as a forked process does."""
        self.started = time.time()
        self.cuda_process: Optional[int] = None  # the process that initialized CUDA
        self.peaks: dict[int, dict[str, int]] = {}  # by device: peaks that the program's own resets would lose
        self.steps: dict[int, int] = {}  # by optimizer, or by DeepSpeed engine
        self.engine_steps: dict[int, bool] = {}  # by DeepSpeed engine in its step: whether an optimizer stepped
        self.ranks: dict[str, int] = {}
        self.failure: Optional[tuple[str, str]] = None
        self.stopped = False
        self.reporting = threading.Lock()
        self.ended = threading.Event()

    # -- around the import of torch

    def load_libraries(self) -> None:
        """Load the stub libraries before torch: by their sonames, the loader then uses them for torch."""
        self.library = ctypes.CDLL(os.path.join(FOLDER, "libmemcalcnull.so"), ctypes.RTLD_GLOBAL)
        self.library.null_most.restype = ctypes.c_size_t
        self.library.null_unmodelled_name.restype = ctypes.c_char_p
        for name in sorted(os.listdir(FOLDER)):
            if name.endswith(".null"):
                ctypes.CDLL(os.path.join(FOLDER, name), ctypes.RTLD_GLOBAL)

    def arrange(self, torch: Any) -> None:
        """Adapt torch after its import."""
        if torch.version.cuda is None:
            return  # a CPU build of another environment
        self.torch = torch
        # cuDNN plans attention itself, with kernels that it compiles, which stubs cannot emulate. It stays off even if
        # a program lists it among several backends (torch.nn.attention.sdpa_kernel). Older versions have no such
        # switch.
        switch = getattr(torch._C, "_set_sdp_use_cudnn", None)  # noqa: SLF001 -- as used by torch.backends.cuda
        if switch is not None:
            torch._C._set_sdp_use_cudnn = lambda _: switch(False)  # noqa: SLF001 -- as above
            switch(False)
        masks.take_masks_as_full(torch, self.library)
        values.begin(torch, self.library, FOLDER, same_for_all=WORST_ROUTING)
        torch.cuda._lazy_call(self.begin)  # noqa: SLF001 -- torch's own callback at CUDA initialization
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
        """Adapt safetensors.torch after its import."""
        if self.torch is not None:
            checkpoints.watch(module, "save_file", place=1, initialized=self.torch.cuda.is_initialized)

    def count_fake_groups(self, _: Any) -> None:
        """Adapt PyTorch's fake process group after its import."""
        if self.torch is not None and not ALONE:  # a rank alone has fake groups in place of Gloo's
            groups.count_fake_groups(self.torch, self.library)

    def choose_kernels(self) -> None:
        """Select the architecture, among those torch was compiled for, that the GPU would use: see src/device.c."""
        flags = self.torch._C._cuda_getArchFlags() or ""  # noqa: SLF001 -- as read by torch.cuda.get_arch_list
        known = sorted(int(version) for version in re.findall(r"\bsm_(\d+)", flags))
        gpu = self.library.null_kernel_version()
        older = [version for version in known if version <= gpu]
        if known:  # a GPU older than all of them cannot run this torch; PyTorch warns about that
            self.library.null_set_kernel_version(older[-1] if older else known[0])

    def begin(self) -> None:
        """Start recording when this process initializes CUDA."""
        self.cuda_process = os.getpid()
        self.choose_kernels()  # not before: reading PyTorch's architectures forbids CUDA after a fork
        if REPORTS:
            self.library.null_keep_books(f"{self.path()}.books".encode())
            # Counted by the device immediately: the program may catch the error, and be killed before the next report.
            self.torch._C._cuda_attach_out_of_memory_observer(  # noqa: SLF001 -- as in PyTorch's guide to snapshots
                lambda device, *_: self.library.null_note_oom(device)
            )
            self.report(allocations=False)
            threading.Thread(target=self.report_while_running, name="memcalc", daemon=True).start()
        if HISTORY:
            self.torch.cuda.memory._record_memory_history(  # noqa: SLF001 -- as in PyTorch's guide
                enabled="all", context="alloc", stacks="python", max_entries=HISTORY_ENTRIES
            )

    def keep_peaks(self) -> None:
        """Save the allocator's peaks before the program resets them."""
        for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
            original = getattr(self.torch._C, name, None)  # noqa: SLF001 -- called by torch.cuda.reset_*
            if original is None:
                continue

            def reset(device: int, original: Callable[[int], Any] = original) -> Any:
                self.read_peaks()
                return original(device)

            setattr(self.torch._C, name, reset)  # noqa: SLF001 -- as above

    def report_at_the_end(self) -> None:
        """Report at the end of the process, if Python is notified of it."""
        atexit.register(self.leave)
        os.register_at_fork(after_in_child=self.forget)
        from multiprocessing import util

        # Forked workers of multiprocessing exit without atexit, through their own finalizers.
        util.register_after_fork(self, lambda watch: util.Finalize(None, watch.report, exitpriority=0))
        former = sys.excepthook

        def note(error_type: type[BaseException], error: BaseException, trace: Optional[types.TracebackType]) -> None:
            self.failure = (error_type.__name__, str(error))
            former(error_type, error, trace)

        sys.excepthook = note
        try:
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                signal.signal(signal.SIGTERM, self.terminate)
        except ValueError:
            pass  # torch was imported by a thread, which cannot set handlers

    def report_while_running(self) -> None:
        """Write reports while the process runs, because it may be killed."""
        ended = self.ended
        while not ended.wait(REPORT_EVERY):
            self.report(allocations=False)

    def leave(self) -> None:
        """Report at the end of the program."""
        self.ended.set()
        self.report()
        # PyTorch's autograd thread may still be freeing the last graph, and aborts the process if Python ends
        # meanwhile. Real kernels take longer, so there the thread has finished.
        time.sleep(LAST_GRAPH)

    def terminate(self, number: int, _: Optional[types.FrameType]) -> None:
        """Report, then end as if there were no handler."""
        self.report()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # -- while the program runs

    def count_engine_steps(self, module: Any) -> None:
        """Adapt deepspeed.runtime.engine after its import: count the engine's steps, not the optimizer's inside them.

        ZeRO calls the optimizer once for each parameter group, and each sub-group (DeepSpeed 0.19
        runtime/zero/stage_1_and_2.py and stage3.py, _optimizer_step). A step that an overflow skips calls none.
        """
        engine_class = getattr(module, "DeepSpeedEngine", None)
        original = getattr(engine_class, "_take_model_step", None)
        if engine_class is None or original is None:
            return  # a version without this method

        @functools.wraps(original)
        def step(engine: Any, *given: Any, **named: Any) -> Any:
            self.engine_steps[id(engine)] = False
            try:
                result = original(engine, *given, **named)
            finally:
                has_stepped = self.engine_steps.pop(id(engine))
            if has_stepped:
                self.count_step(engine)
            return result

        engine_class._take_model_step = step  # noqa: SLF001 -- DeepSpeed's one method for all kinds of steps

    def after_step(self, optimizer: Any, *_: Any) -> None:
        """Count a step of an optimizer, unless a DeepSpeed engine makes it a part of its own step."""
        if self.engine_steps:
            self.engine_steps = dict.fromkeys(self.engine_steps, True)
        else:
            self.count_step(optimizer)

    def count_step(self, owner: Any) -> None:
        """Count a step of an optimizer or a DeepSpeed engine."""
        steps = self.steps[id(owner)] = self.steps.get(id(owner), 0) + 1
        self.library.null_note_steps(ctypes.c_int64(max(self.steps.values())))
        if steps <= FIRST_STEPS and self.counts()["communicators"]:
            time.sleep(WATCHDOG)
        if STEPS and steps >= STEPS:
            self.stopped = True
            self.report()
            sys.stdout.flush()
            sys.stderr.flush()
            # No clean-up by the program: it would write checkpoints of zeros.
            os._exit(0)

    def read_peaks(self) -> None:
        """Update the peaks from the allocator's counters."""
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
        """Read the rank of this process."""
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            if os.environ.get(name, "").isdecimal():
                self.ranks[name.lower()] = int(os.environ[name])
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            self.ranks.update(rank=distributed.get_rank(), world_size=distributed.get_world_size())

    # -- the report

    def path(self) -> str:
        """Return the common prefix of this process's report files."""
        return os.path.join(str(REPORTS), f"{os.getpid()}-{self.started:.6f}")

    def report(self, *, allocations: bool = True) -> None:
        """Write a report in place of the previous one."""
        # A signal handler may interrupt the holder of the lock, so it must not wait for it.
        taken = self.reporting.acquire(timeout=1.0)
        try:
            self.read_peaks()
            self.read_ranks()
            path = f"{self.path()}.json"
            text = json.dumps(self.document(allocations=allocations))
            try:
                write(path, text)
            except OSError:  # the disk is full: use the reserved space
                open(path + ".lost", "w").close()
                os.unlink(os.path.join(str(REPORTS), RESERVE))
                write(path, text)
            if os.path.exists(path + ".lost"):
                os.unlink(path + ".lost")
        except Exception as error:  # noqa: BLE001 -- the program must not fail because of a report
            sys.stderr.write(f"memcalc: no report of process {os.getpid()}: {error!r}\n")
        finally:
            if taken:
                self.reporting.release()

    def counts(self) -> dict[str, int]:
        """Return the device's counters by name."""
        numbers = (ctypes.c_longlong * len(COUNTS))()
        self.library.null_read_counts(numbers)
        return dict(zip(COUNTS, numbers))

    def document(self, *, allocations: bool) -> dict[str, Any]:
        """Return the report."""
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

    def unmodelled(self) -> list[str]:
        """Return the names of called functions that the stubs do not model."""
        names: list[str] = []
        while (name := self.library.null_unmodelled_name(len(names))) is not None:
            names.append(name.decode())
        return names


class Finder:
    """First entry of sys.meta_path: finds some modules by the other finders, and runs functions around their import."""

    def __init__(self, around: dict[str, tuple[Callable[[], None], Callable[[Any], None]]]) -> None:
        self.around = around  # by module: functions called before and after its execution
        self.asking = ""

    def find_spec(self, name: str, *_: Any, **__: Any) -> Optional[importlib.machinery.ModuleSpec]:
        """Return the module's spec with a wrapped loader. Programs also call it to find torch without importing it."""
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
            before, after = self.around.pop(name, (nothing, nothing))  # only once
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
    "deepspeed.runtime.engine": (nothing, watch.count_engine_steps),
    "torch.testing._internal.distributed.fake_pg": (nothing, watch.count_fake_groups),
}
if ALONE:
    AROUND["torch.distributed.pipelining.stage"] = (nothing, groups.vote_alone)
if RANDOM_WEIGHTS:
    AROUND["transformers.modeling_utils"] = (nothing, weights.replace_from_pretrained)
sys.meta_path.insert(0, Finder(AROUND))
