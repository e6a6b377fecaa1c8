"""Color screen, with Rich."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from memcalc.report.screen import Screen, Span
from memcalc.text import harmless


class ColorScreen(Screen):
    """Lines on a Rich console. Markup is off: names may hold square brackets."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(markup=False, emoji=False, highlight=False)
        super().__init__(self.console.file, self.console.width)  # type: ignore[arg-type] # typing.IO[str]

    def line(self, *spans: Span) -> None:
        """Print the spans as one line, each in its style."""
        text = Text.assemble(*((harmless(part), style) for part, style in spans))
        text.rstrip()
        self.console.print(text, no_wrap=True, overflow="ignore", crop=False)
