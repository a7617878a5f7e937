"""What the programs of a world were told. No crash touches it; only a restored backup puts it back."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiopersist as ap
from tests.table.history import Event


@dataclass
class Tagged:
    """A tag that a program has begun to add; names are used once."""

    shard: str
    name: str
    expires_s: float | None
    as_of: Any = None
    """The time that was asked for; `None`: the newest."""
    rows: list[Any] | None = None
    """The contents at that time, as they were read before; `None`: all updates are in the log."""
    view: ap.TagView | None = None
    """What its program was told."""
    calls: int = 0
    """Calls to add it that had no answer."""
    is_dropped: bool = False
    """Whether somebody has begun to drop it."""
    is_gone: bool = False
    """Whether somebody was told that it is dropped."""


@dataclass
class Publication:
    """A shard that programs publish."""

    contents: dict[Any, Any] = field(default_factory=dict)
    """By time, of those that somebody has begun to publish."""
    version: int = 0
    """The newest that somebody was told of."""
    is_ended: bool = False
    """Whether somebody has begun to end it."""


@dataclass
class Ledger:
    """See the header. Updates of the shard `events` have numbers, each sent once."""

    sent: set[int] = field(default_factory=set)
    told: dict[int, int] = field(default_factory=dict)
    """The times of the updates whose commit was acknowledged."""
    refused: set[int] = field(default_factory=set)
    """Updates that surely did not happen, as their writers were told."""
    done: Counter[str] = field(default_factory=Counter)
    """How far each machine has come, by its name."""
    begun: Counter[str] = field(default_factory=Counter)
    """How far those have come who begin several steps at once: what a crash cut off may have happened."""
    snapshots: list[tuple[int, list[Any]]] = field(default_factory=list)
    heard: dict[str, list[tuple[str, int, int, int]]] = field(default_factory=dict)
    """By listener, all updates that it was told."""
    cursors: dict[str, str] = field(default_factory=dict)
    """Where each listener goes on."""
    batches: dict[int, bytes] = field(default_factory=dict)
    """Batches that were handed over, by number."""
    pieces: dict[bytes, bytes | None] = field(default_factory=dict)
    """Pieces of compactions, and their results."""
    promised: dict[str, int] = field(default_factory=dict)
    """The frontiers at which holds keep history."""
    written: dict[str, dict[Any, Any]] = field(default_factory=dict)
    """Keys that were acknowledged, by what they are in."""
    log: list[tuple[str, int, int, int]] = field(default_factory=list)
    """All updates of `events`, as a subscription was told them to which nothing happens."""
    frontier: int = 0
    events: list[Event] = field(default_factory=list)
    """What the players of tables were told."""
    tags: dict[tuple[str, str], Tagged] = field(default_factory=dict)
    """By shard and name."""
    publications: dict[str, Publication] = field(default_factory=dict)
    """By shard."""

    def write(self, where: str, key: Any, val: Any) -> None:
        """Note that `key` was acknowledged."""
        self.written.setdefault(where, {})[key] = val

    def contents(self, before: int) -> list[Any]:
        """Of `events` at the last time before `before`."""
        return sorted((key, val, diff) for key, val, time, diff in self.log if time < before)
