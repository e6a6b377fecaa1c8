"""The picture as SVG inside a page: plain text, made without matplotlib."""

from __future__ import annotations

from memcalc.events.downsampling import DownsampledTimeline
from memcalc.events.memory_curve import MemoryCurve
from memcalc.report.plots.markup import AxisMark, markup, phase_marks, step_marks
from memcalc.report.plots.palette import LIMIT, RESERVED, color, name
from memcalc.units import BYTES_PER_UNIT, Unit, format_bytes

LEFT, TOP, WIDTH, HEIGHT = 70, 34, 1110, 420  # of the field that is drawn on, in pixels
_BELOW = 124  # for the words of the axis
_PER_LETTER = 6.5  # pixels that a letter takes, at most
_NARROWEST = 13  # pixels that an upright word takes
_SEPARATED = 6.0  # pixels; lines closer together would hide the areas between them
_STEPS = (1, 2, 5)  # round numbers: these times a power of ten
_LINES = 6  # of the axis, at most


def curve_svg(curve: MemoryCurve, outline: DownsampledTimeline, unit: Unit) -> str:
    """Return an <svg> element; a line of text if nothing was allocated."""
    if not outline.top:
        return "<p>Nothing was allocated.</p>"
    field = _Field(outline)
    body = [*field.axis(unit), *field.parts(), *field.reserved(), *field.phases(), *field.peak(curve, unit)]
    size = f'viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + _BELOW}"'
    label = markup(f"Memory over the run, stacked by component; peak {format_bytes(curve.peak_bytes, unit)}")
    lines = "\n".join(body)
    font = 'font-family="system-ui, sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font} role="img" aria-label="{label}">\n{lines}\n</svg>'


class _Field:
    """Places on the picture."""

    def __init__(self, outline: DownsampledTimeline) -> None:
        self.outline = outline

    def x(self, event: float) -> float:
        return round(LEFT + WIDTH * event / self.outline.length, 2)

    def y(self, size: float) -> float:
        return round(TOP + HEIGHT - HEIGHT * size / self.outline.top, 2)

    def steps(self, sizes: list[int]) -> list[tuple[float, float]]:
        """Return the corners of a step curve, which steps at the start of each interval."""
        corners: list[tuple[float, float]] = []
        for interval, size in zip(self.outline.stretches, sizes, strict=True):
            height = self.y(size)
            if not corners or corners[-1][1] != height:
                if corners:
                    corners.append((self.x(interval.begin), corners[-1][1]))
                corners.append((self.x(interval.begin), height))
        return [*corners, (self.x(self.outline.length), corners[-1][1])]

    def axis(self, unit: Unit) -> list[str]:
        """Lines at round numbers."""
        size = BYTES_PER_UNIT[unit]
        step = round_step(self.outline.top / size)
        lines = []
        for number in range(int(self.outline.top / size / step) + 1):
            y = self.y(number * step * size)
            lines.append(f'<path d="M{LEFT} {y}h{WIDTH}" stroke="#ddd"/>')
            lines.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{number * step:,.6g}</text>')
        return [*lines, f'<text x="{LEFT - 8}" y="{TOP - 16}" text-anchor="end">{unit}</text>']

    def parts(self) -> list[str]:
        """One shape for each component, with its name to be read where the pointer rests."""
        outline = self.outline
        below = [0] * len(outline.stretches)
        shapes = []
        for at, component in enumerate(outline.components):
            above = [level + interval.components[at] for level, interval in zip(below, outline.stretches, strict=True)]
            corners = self.steps(above) + self.steps(below)[::-1]
            shapes.append(
                f'<path class="part" data-part="{name(component)}" fill="{color(component)}" '
                f'd="M{_points(corners)}z"><title>{name(component)}</title></path>'
            )
            below = above
        return shapes

    def reserved(self) -> list[str]:
        """Return a dashed line for reserved memory, and a line at the GPU's limit, if they are known."""
        held = [interval.reserved for interval in self.outline.stretches if interval.reserved is not None]
        lines = []
        if held:
            path = _points(self.steps(held))
            lines.append(
                f'<path d="M{path}" fill="none" stroke="{RESERVED}" stroke-dasharray="6 3" stroke-width="1.3"/>'
            )
        if self.outline.limit is not None:
            y = self.y(self.outline.limit)
            lines.append(f'<path d="M{LEFT} {y}h{WIDTH}" stroke="{LIMIT}" stroke-width="1.6"/>')
            lines.append(f'<text x="{LEFT + 6}" y="{y + 14}">usable GPU memory</text>')
        return lines

    def phases(self) -> list[str]:
        """Words under the axis, upright where they are narrow; the pointer shows the name of each."""
        bottom = TOP + HEIGHT
        phases, steps = phase_marks(self.outline.spans), step_marks(self.outline.spans)
        lines = [f'<path d="M{LEFT} {bottom}h{WIDTH}" stroke="#333"/>']
        for mark in phases:
            x, width = self.x(mark.begin), self._width(mark)
            if width >= _SEPARATED:
                lines.append(f'<path d="M{x} {TOP}V{bottom}" stroke="#fff" stroke-opacity=".5" stroke-width=".7"/>')
            lines.append(f'<path d="M{x} {bottom}v6" stroke="#555"/>')
            lines.append(
                f'<rect x="{x}" y="{bottom}" width="{width}" height="96" fill="#fff" fill-opacity="0">'
                f"<title>{markup(mark.word)}</title></rect>"
            )
            lines += self._word(mark, bottom + 18)
        for mark in steps:
            lines.append(f'<path d="M{self.x(mark.begin)} {TOP}V{bottom + 114}" stroke="#555"/>')
            if self._fits(mark):
                lines.append(f'<text x="{self.x(mark.begin) + 6}" y="{bottom + 114}">{markup(mark.word)}</text>')
        return lines

    def peak(self, curve: MemoryCurve, unit: Unit) -> list[str]:
        """Return a dot with the peak's value and phase, and the line that follows the pointer."""
        peak = self.outline.stretches[self.outline.peak]
        x, y = self.x(peak.event + 0.5), self.y(peak.total)
        right = peak.event > self.outline.length / 2
        phase = curve.phase_of(peak.event)
        words = markup(f"peak {format_bytes(peak.total, unit)}{f' in {phase}' if phase else ''}")
        anchor = "end" if right else "start"
        side = f'x="{x + (-8 if right else 8)}" text-anchor="{anchor}"'
        lines = [
            f'<circle cx="{x}" cy="{y}" r="4"/>',
            f'<path d="M{x} {y}V{TOP - 14}" stroke="#000"/>',
            f'<text class="strong" {side} y="{TOP - 16}">{words}</text>',
        ]
        if self.outline.failed:
            end = LEFT + WIDTH
            place = f"translate({end + 14} {TOP + HEIGHT}) rotate(-90)"
            lines.append(f'<path d="M{end} {TOP}v{HEIGHT}" stroke="#000" stroke-width="3"/>')
            lines.append(f'<text class="strong" transform="{place}">out of memory</text>')
        return [*lines, f'<line id="cursor" y1="{TOP}" y2="{TOP + HEIGHT}"/>']

    def _width(self, mark: AxisMark) -> float:
        return round(self.x(mark.end) - self.x(mark.begin), 2)

    def _fits(self, mark: AxisMark) -> bool:
        return self._width(mark) >= len(mark.word) * _PER_LETTER

    def _word(self, mark: AxisMark, y: float) -> list[str]:
        middle = round((self.x(mark.begin) + self.x(mark.end)) / 2, 2)
        word = markup(mark.word)
        if self._fits(mark):
            return [f'<text x="{middle}" y="{y}" text-anchor="middle" pointer-events="none">{word}</text>']
        if self._width(mark) < _NARROWEST:
            return []
        place = f'transform="translate({middle + 4} {y - 8}) rotate(-90)"'
        return [f'<text {place} text-anchor="end" pointer-events="none">{word}</text>']


def round_step(top: float) -> float:
    """Return the distance between the lines of an axis that ends at `top`: a round number that gives few lines."""
    power = 1.0
    while top / power <= _LINES:
        power /= 10
    while True:
        for digit in _STEPS:
            if top / (digit * power) <= _LINES:
                return digit * power
        power *= 10


def _points(corners: list[tuple[float, float]]) -> str:
    return "L".join(f"{x:g} {y:g}" for x, y in corners)
