"""Finds the out-of-memory reports of a log: one pass, bounded memory, each speaker's words followed by themselves."""

from __future__ import annotations

import re
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from memcalc.diagnosis.report import Report
from memcalc.diagnosis.speakers import spoken, squeezed, without_colours
from memcalc.diagnosis.streams import Line, lines_worth_reading
from memcalc.diagnosis.tracebacks import phase_of
from memcalc.diagnosis.wordings.catalogue import LONGEST_HEAD, Head, find_head, has_trigger, read_message

_REMEMBERED = 600  # letters before a head that may be needed to see it: two wrapped lines
_MOST_LINES = 64  # of one message; the longest list the processes of a whole node
_MOST_SPEAKERS = 512
_FRAMES = 40  # of a traceback, the innermost
_FRAME_LINES = 8  # from the innermost frame to the message: the line of code, its carets, a blank one
_TRACEBACK = "Traceback (most recent call last)"

_FRAME = re.compile(r'\s{0,40}File "([^"]{1,300})", line \d{1,7}, in ([\w<>.]{1,100})')


@dataclass(slots=True)
class _Voice:
    """What one speaker said of late, without blanks."""

    text: str = ""
    scanned: int = 0  # everything before has been looked at
    marks: list[tuple[int, int]] = field(default_factory=list)  # where each line begins in the text, and its number
    head: Head | None = None  # of a message whose end has not come yet
    waited: int = 0  # lines since that head was seen
    alert: bool = False  # the line before had a trigger
    frames: deque[tuple[str, str]] = field(default_factory=lambda: deque(maxlen=_FRAMES))
    since_frame: int = 0  # lines since the last of them
    phase: str = ""  # where the traceback before the head was

    def hear(self, number: int, text: str) -> None:
        """One more line."""
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
        """Let go of what no message can need any more."""
        cut = len(self.text) - _REMEMBERED if self.head is None else self.head.match.start()
        if cut < _REMEMBERED and len(self.marks) <= 2 * _MOST_LINES:
            return
        cut = max(0, cut)
        self.text = self.text[cut:]
        self.scanned = max(0, self.scanned - cut)
        self.marks = [(max(0, at - cut), number) for at, number in self.marks[-_MOST_LINES - 1 :]]
        if self.head is not None:
            self.head = find_head(self.text, 0)  # the same one, in the shorter text

    def find(self) -> bool:
        """Whether a message has begun."""
        if self.head is None:
            self.head = find_head(self.text, self.scanned)
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
    """Reads lines and gives reports."""

    def __init__(self) -> None:
        self._voices: OrderedDict[str, _Voice] = OrderedDict()
        self._last: tuple[int, str] = (0, "")  # the last line's number and speaker

    def reports(self, stream: BinaryIO) -> Iterator[Report]:
        """Every report of a log, in the order in which they end; fragments among them."""
        for line in lines_worth_reading(stream, lambda chunk: self._waiting or has_trigger(chunk)):
            yield from self.feed(line)
        for speaker, voice in self._voices.items():
            yield from self._settle(speaker, voice, last=True)

    @property
    def _waiting(self) -> bool:
        return any(voice.head is not None for voice in self._voices.values())

    def feed(self, line: Line) -> Iterator[Report]:
        """Reports that end with this line."""
        said = spoken(without_colours(line.text))
        speaker = self._speaker(line, said.speaker)
        self._last = line.number, speaker
        voice = self._voice(speaker)
        voice.hear(line.number, said.text)
        trigger = has_trigger(line.text.encode("utf-8", "replace"))
        if voice.head is not None or trigger or voice.alert:
            yield from self._settle(speaker, voice, last=False)
        voice.alert = trigger
        voice.forget()
        if len(self._voices) > _MOST_SPEAKERS:
            yield from self._settle(*self._voices.popitem(last=False), last=True)

    def _speaker(self, line: Line, named: str) -> str:
        """A line without a name goes on where a message has just begun: loggers name only its first line."""
        number, last = self._last
        if not named and last and line.number - number <= 1:
            voice = self._voices.get(last)
            if voice is not None and voice.head is not None:
                return last
        return named

    def _voice(self, speaker: str) -> _Voice:
        voice = self._voices.get(speaker)
        if voice is None:
            voice = self._voices[speaker] = _Voice()
        self._voices.move_to_end(speaker)
        return voice

    def _settle(self, speaker: str, voice: _Voice, *, last: bool) -> Iterator[Report]:
        """Messages that are complete, or that cannot become so."""
        while voice.find():
            head = voice.head
            assert head is not None
            report, end = read_message(head, voice.text)
            enough = len(voice.text) - end >= head.wait or voice.waited >= _MOST_LINES
            if not (last or enough):
                return
            voice.scanned = max(end, head.match.end())
            if report is not None:
                speakers = (speaker,) if speaker else ()
                phase = "" if head.fragment else voice.phase
                yield replace(report, line=voice.line, speakers=speakers, phase=phase)
            voice.head = None
