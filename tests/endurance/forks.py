"""A process that forks while it is at work. Beside the servers it has a directory open, which all processes
of the run share: a child may use neither that nor a client of its parent, and may open the servers anew.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import aiopersist as ap
from tests.endurance.notes import Notes
from tests.support.forked import fork

FORK_S = 4.0
CHILD_S = 240
REFUSED = ("InvalidUsage", ap.UsageKind.WRONG_LOOP)


class Wrong(AssertionError):
    """An outcome that no child may have."""


async def put(location: str, key: str) -> None:
    """Open a directory anew, and put."""
    async with ap.open(location, maintenance=False) as client:
        await client.table("local", key=str, val=int).put(key, 1)


class Forks:
    """The directory `local` in one process, and its forks."""

    def __init__(self, name: str, local: str, client: ap.Client, note: Notes, dice: random.Random) -> None:
        self.name = name
        self.local = local
        self.table = client.table("local", key=str, val=int)
        self.note = note
        self.dice = dice

    async def put(self, number: int) -> None:
        """A put of the parent; each of which it is told is looked for in the end."""
        op = f"{self.name}-local-{number}"
        self.note("began", "local", op)
        await self.table.put(op, 1)
        self.note("told", "local", op)

    async def fork(self, number: int, counts: Callable[[str], Coroutine[Any, Any, Any]]) -> str | None:
        """A child, which is refused or not as it must be. The id of what it was to count on the servers, if
        it was to."""
        op = f"{self.name}-fork-{number}"
        what = self.dice.choice(["inherited", "anew", "elsewhere", "servers"])
        works: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
            "inherited": partial(self.table.put, op, 1),
            "anew": partial(put, self.local, op),
            "elsewhere": partial(put, str(Path(self.local, "..", op)), op),
            "servers": partial(counts, op),
        }
        if what == "servers":
            self.note("began", "count", op)
        found = await asyncio.to_thread(
            fork(works[what], end_s=CHILD_S)
        )  # on the loop: no import is under way
        if what in ("inherited", "anew") and (found is None or found[:2] != REFUSED):
            raise Wrong(f"a child ({what}) was not refused: {found}")
        if what == "elsewhere" and found is not None:
            raise Wrong(f"a child was refused elsewhere: {found}")
        self.note("told", "fork", op, what)
        return op if what == "servers" else None
