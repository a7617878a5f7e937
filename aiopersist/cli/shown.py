"""How values look to people on a terminal: times, frontiers, sizes, ages, in the words of the inspector; and
texts that may hold anything."""

import re
from collections.abc import Mapping
from typing import Literal

import pydantic_core
from rich.table import Table
from rich.text import Text

from aiopersist.base.frontier import Antichain, Time
from aiopersist.cli.terminal import escaped
from aiopersist.state.model import Clock
from aiopersist.web.words import counted as counted
from aiopersist.web.words import (
    duration_text,
    frontier_text,
    moment_text,
    short_id,
    size_text,
    time_text,
)

NOTHING = "-"
shown_bytes = size_text  # as the inspector says them
FRACTION = re.compile(r"\.\d+Z")


def shown_time(time: Time | None, clock: Clock) -> str:
    """A time; on a wall clock the instant that it is, as options take it."""
    if time is None:
        return NOTHING
    text = time_text(time, clock)
    return f"{text}Z" if ":" in text else text


def shown_frontier(frontier: Antichain | None, clock: Clock) -> str:
    """A frontier: its times; `the end` for the empty one."""
    if frontier is None:
        return NOTHING
    text = frontier_text(frontier, clock)
    return f"{text}Z" if len(frontier.elements) == 1 and ":" in text else text


def short_frontier(frontier: Antichain | None, clock: Clock) -> str:
    """A frontier in a list: instants to the second."""
    return FRACTION.sub("Z", shown_frontier(frontier, clock))


def shown_moment(seconds: float) -> str:
    """A moment in Unix seconds, in UTC."""
    return f"{moment_text(seconds)}Z"


def shown_age(seconds: float) -> str:
    """A duration in its largest unit; a second is the least."""
    return duration_text(max(round(seconds), 0)) if seconds >= 1 else "0 s"


def safe(text: str) -> Text:
    """A text that may hold anything, for a terminal: nothing in it moves the cursor, nothing is markup."""
    return Text(text if text.isprintable() else escaped(pydantic_core.to_json(text).decode()))


def shown_id(id: str) -> str:
    """What tells one reader or writer from another: the first digits of its id; another text as it is."""
    return short_id(id.partition("@")[0])


def record(cells: Mapping[str, str | Text]) -> Table:
    """One thing as lines of a name and its value."""
    table = plain_table("", "")
    table.show_header = False
    for name, cell in cells.items():
        table.add_row(Text(f"  {name}", style="dim"), safe(cell) if isinstance(cell, str) else cell)
    return table


def plain_table(*columns: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> Table:
    """A table of lines, without boxes. Columns in `right` hold numbers; these and `whole` ones stay on one
    line. Where the terminal is narrow, other texts go on in a next line: nothing is cut."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        justify: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(name, justify=justify, no_wrap=name in (*right, *whole), overflow="fold")
    return table
