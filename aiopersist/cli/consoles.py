"""Consoles of rich for results and messages."""

import os
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from aiopersist.cli.terminal import UNSAFE, escaped

PIPE_WIDTH = 4096  # characters: programs that read a pipe need whole lines


class SafeConsole(Console):
    """A console that escapes texts, but not rich's own control codes."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or not UNSAFE.search(text) else Segment(escaped(text), style)


def results() -> SafeConsole:
    """For results: lines are not wrapped in a pipe."""
    is_wide = sys.stdout.isatty() or "COLUMNS" in os.environ
    return SafeConsole(file=sys.stdout, width=None if is_wide else PIPE_WIDTH)


def messages() -> SafeConsole:
    """For messages and progress."""
    return SafeConsole(stderr=True)
