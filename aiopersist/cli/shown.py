"""Texts for a terminal: times, frontiers, sizes and ages, as in the inspector; and texts of users."""

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
shown_bytes = size_text
FRACTION = re.compile(r"\.\d+Z")


def shown_time(time: Time | None, clock: Clock) -> str:
    """A time; on a wall clock an instant, in the form that options take."""
    if time is None:
        return NOTHING
    text = time_text(time, clock)
    return f"{text}Z" if ":" in text else text


def shown_frontier(frontier: Antichain | None, clock: Clock) -> str:
    """A frontier: its times, or `the end` if it is empty."""
    if frontier is None:
        return NOTHING
    text = frontier_text(frontier, clock)
    return f"{text}Z" if len(frontier.elements) == 1 and ":" in text else text


def short_frontier(frontier: Antichain | None, clock: Clock) -> str:
    """A frontier with instants to the second, for lists."""
    return FRACTION.sub("Z", shown_frontier(frontier, clock))


def shown_moment(seconds: float) -> str:
    """A moment in Unix seconds, in UTC."""
    return f"{moment_text(seconds)}Z"


def shown_age(seconds: float) -> str:
    """A duration in its largest unit, in whole seconds at least."""
    return duration_text(max(round(seconds), 0)) if seconds >= 1 else "0 s"


def safe(text: str) -> Text:
    """A text of users for a terminal: it cannot move the cursor, and is no markup."""
    return Text(text if text.isprintable() else escaped(pydantic_core.to_json(text).decode()))


def shown_id(id: str) -> str:
    """The first digits of the id of a reader or writer; another text unchanged."""
    return short_id(id.partition("@")[0])


def record(cells: Mapping[str, str | Text]) -> Table:
    """A record as lines of name and value."""
    table = plain_table("", "")
    table.show_header = False
    for name, cell in cells.items():
        table.add_row(Text(f"  {name}", style="dim"), safe(cell) if isinstance(cell, str) else cell)
    return table


def plain_table(*columns: str, right: tuple[str, ...] = (), whole: tuple[str, ...] = ()) -> Table:
    """A table without boxes. Columns in `right` hold numbers. These and the columns in `whole` never wrap;
    others wrap on a narrow terminal, so nothing is cut."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        justify: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(name, justify=justify, no_wrap=name in (*right, *whole), overflow="fold")
    return table
