"""Scanner of a log for out-of-memory reports: one pass, bounded memory, one buffer per log source."""

from __future__ import annotations

import io
import re
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from memcalc.diagnosis.log_prefixes import split_prefix, squeezed, without_colors
from memcalc.diagnosis.log_reader import LogChunk, LogLine, Readable, chunks_worth_reading, lines_of
from memcalc.diagnosis.parsers.catalogue import (
    LONGEST_HEAD,
    Effort,
    Head,
    find_head,
    has_trigger,
    lines_with_triggers,
    read_message,
)
from memcalc.diagnosis.report import OutOfMemoryReport

_REMEMBERED = 600  # characters before a head that may be needed to recognize it: two wrapped lines
_MOST_LINES = 64  # of one message; the longest list the processes of a whole node
_MOST_SPEAKERS = 512
_FRAMES = 40  # of a traceback, the innermost
_FRAME_LINES = 8  # from the innermost frame to the message: the source line, its carets, a blank line
_EFFORT = 24_000  # units of work for every log: a third of a second
_EFFORT_PER_MEGABYTE = 2_000  # additional units per megabyte: a thirtieth of a second
_MOST_KNOWN = 20_000  # lines
_MOST_PROMISING = 10_000  # units: a sixth of a second

# A size inside a sentence, as in all messages with figures: "20.00 MiB (GPU 0", "123456 bytes."
_FIGURE = re.compile(rb"\d ?(?:bytes|[KMGT]i?B)[.,;(]|\d ?(?:bytes|[KMGT]i?B) [(a-z]")
_TRACEBACK = "Traceback (most recent call last)"

_FRAME = re.compile(r'\s{0,40}File "([^"]{1,300})", line \d{1,7}, in ([\w<>.]{1,100})')


@dataclass(slots=True)
class _LogSource:
    """The recent text of one log source, without whitespace."""

    text: str = ""
    scanned: int = 0  # everything before has been searched
    marks: list[tuple[int, int]] = field(default_factory=list)  # position of each line in the text, and its number
    head: Head | None = None  # of an incomplete message
    waited: int = 0  # lines since that head was seen
    alert: bool = False  # the previous line had a trigger
    frames: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=_FRAMES))
    since_frame: int = 0  # lines since the last frame
    phase: str = ""  # of the traceback before the head
    effort: Effort = field(default_factory=Effort)

    def hear(self, number: int, text: str) -> None:
        """Append a line."""
        frame = _FRAME.match(text)
        if frame is not None:
            self.frames.append((frame[1], frame[2]))
            self.since_frame = 0
        elif _TRACEBACK in text:
            self.frames.clear()
        self.since_frame += 1
        self.waited += 1
        self.marks.append((len(self.text), number))
        self.text += squeezed(text)

    def forget(self) -> None:
        """Drop text that no message can need anymore."""
        cut = len(self.text) - _REMEMBERED if self.head is None else self.head.match.start()
        if cut < _REMEMBERED and len(self.marks) <= 2 * _MOST_LINES:
            return
        cut = max(0, cut)
        self.text = self.text[cut:]
        self.scanned = max(0, self.scanned - cut)
        self.marks = [(max(0, at - cut), number) for at, number in self.marks[-_MOST_LINES - 1 :]]
        if self.head is not None:
            self.head = find_head(self.text, 0, self.effort)  # the same head, in the shorter text

    def find(self) -> bool:
        """Return whether a message has begun."""
        if self.head is None:
            self.head = find_head(self.text, self.scanned, self.effort)
            if self.head is None:
                self.scanned = max(self.scanned, len(self.text) - LONGEST_HEAD)
            self.waited = 0
            self.phase = phase_of(self.frames) if self.since_frame <= _FRAME_LINES else ""
        return self.head is not None

    @property
    def line(self) -> int:
        """The number of the line in which the message begins."""
        start = 0 if self.head is None else self.head.match.start()
        return max((number for at, number in self.marks if at <= start), default=1)


class Scanner:
    """Scanner that reads lines and yields reports.

    Lines are followed per log source, across line breaks, as long as the time budget for the log's size allows: any log
    is read at some megabytes per second. Beyond that each line is read separately, and identical lines only once.
    """

    def __init__(self) -> None:
        self.passed = 0  # lines that may hold a message and were skipped for lack of time
        self._voices: OrderedDict[str, _LogSource] = OrderedDict()
        self._last: tuple[int, str] = (0, "")  # number and log source of the last line
        self._effort = Effort()
        self._read = 0  # bytes
        self._promising = 0  # units of work on lines with figures, which are read regardless of time
        self._known: dict[bytes, tuple[OutOfMemoryReport, ...]] = {}  # line that was read separately -> its reports

    def reports(self, stream: Readable) -> Iterator[OutOfMemoryReport]:
        """Yield every report of a log, in the order in which they end, including fragments."""
        for chunk in chunks_worth_reading(stream, self._wants):
            for line in lines_of(chunk):
                if self._is_slow:
                    yield from self._reports_of_lines(chunk, line.number)
                    break
                yield from self.feed(line)
        for speaker, voice in self._voices.items():
            yield from self._settle(speaker, voice, last=True)

    def _wants(self, chunk: bytes) -> bool:
        self._read += len(chunk)
        return self._waiting or has_trigger(chunk)

    @property
    def _is_slow(self) -> bool:
        return self._effort.units > _EFFORT + _EFFORT_PER_MEGABYTE * self._read // 10**6

    def _reports_of_lines(self, chunk: LogChunk, first: int) -> Iterator[OutOfMemoryReport]:
        """Yield the reports of a chunk's lines, each read separately, from line number `first` on."""
        number, counted = chunk.number, 0
        for begin, end in lines_with_triggers(chunk.content):
            number += chunk.content.count(b"\n", counted, begin)
            counted = begin
            if number < first:
                continue
            content = chunk.content[begin:end]
            found = self._known.get(content)
            if found is None:
                promising = self._promising < _MOST_PROMISING and _FIGURE.search(content) is not None
                if (self._is_slow and not promising) or len(self._known) >= _MOST_KNOWN:
                    self.passed += 1
                    continue
                alone = Scanner()
                found = tuple(alone.reports(io.BytesIO(content)))
                self._known[content] = found
                units = alone._effort.units + 1
                self._effort.units += units
                self._promising += units * promising
            for report in found:
                yield replace(report, line=number)

    @property
    def _waiting(self) -> bool:
        return any(voice.head is not None for voice in self._voices.values())

    def feed(self, line: LogLine) -> Iterator[OutOfMemoryReport]:
        """Yield the reports that end with this line."""
        self._effort.units += 1
        prefixed = split_prefix(without_colors(line.text))
        speaker = self._speaker(line, prefixed.source)
        self._last = line.number, speaker
        voice = self._voice(speaker)
        voice.hear(line.number, prefixed.text)
        trigger = has_trigger(line.text.encode("utf-8", "replace"))
        if voice.head is not None or trigger or voice.alert:
            yield from self._settle(speaker, voice, last=False)
        voice.alert = trigger
        voice.forget()
        if len(self._voices) > _MOST_SPEAKERS:
            yield from self._settle(*self._voices.popitem(last=False), last=True)

    def _speaker(self, line: LogLine, named: str) -> str:
        """Return the source of a line; a line without prefix continues a message that has just begun."""
        number, last = self._last
        if not named and last and line.number - number <= 1:
            voice = self._voices.get(last)
            if voice is not None and voice.head is not None:
                return last
        return named

    def _voice(self, speaker: str) -> _LogSource:
        voice = self._voices.get(speaker)
        if voice is None:
            voice = self._voices[speaker] = _LogSource(effort=self._effort)
        self._voices.move_to_end(speaker)
        return voice

    def _settle(self, speaker: str, voice: _LogSource, *, last: bool) -> Iterator[OutOfMemoryReport]:
        """Yield messages that are complete, or cannot become complete."""
        while voice.find():
            head = voice.head
            assert head is not None
            report, end = read_message(head, voice.text, self._effort)
            enough = len(voice.text) - end >= head.wait or voice.waited >= _MOST_LINES
            if not (last or enough):
                return
            voice.scanned = max(end, head.match.end())
            if report is not None:
                speakers = (speaker,) if speaker else ()
                phase = "" if head.fragment else voice.phase
                yield replace(report, line=voice.line, sources=speakers, phase=phase)
            voice.head = None


# The innermost frame with a phase decides: a loss is computed inside forward, a weight is gathered inside backward.
# Files and functions of PyTorch, transformers, accelerate and DeepSpeed.
_FILES = (
    ("torch/optim/", "optimizer_step"),
    ("torch/autograd/", "backward"),
    ("torch/nn/modules/loss.py", "loss"),
    ("loss_utils.py", "loss"),
    ("torch/utils/checkpoint.py", "forward"),
)
_FUNCTIONS = {
    "cross_entropy": "loss",
    "log_softmax": "loss",
    "ForCausalLMLoss": "loss",
    "backward": "backward",
    "step": "optimizer_step",
    "_apply": "model",
    "load_state_dict": "model",
    "from_pretrained": "model",
    "forward": "forward",
    "_call_impl": "forward",
}
_OUTERMOST = ("backward", "optimizer_step")  # recomputation runs forward inside backward


def phase_of(frames: Iterable[tuple[str, str]]) -> str:
    """Return "forward", "loss", "backward", "optimizer_step" or "model"; "" if the frames do not show the phase.

    Args:
        frames: file and function of each frame, outermost first.
    """
    phases = [phase for phase in (_phase(*frame) for frame in frames) if phase]
    for phase in phases:
        if phase in _OUTERMOST:
            return phase
    return phases[-1] if phases else ""


def _phase(file: str, function: str) -> str:
    path = file.replace("\\", "/")
    for part, phase in _FILES:
        if part in path:
            return phase
    return _FUNCTIONS.get(function, "")
