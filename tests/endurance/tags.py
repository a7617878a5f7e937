"""Tags in the long run. Each process tags the log, reads its tags again, and drops the oldest. A tag of one
that is killed expires, or is there at the end, with as many rows as its note tells."""

import random
import time
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any

import aiopersist as ap
from tests.endurance.notes import Note, Notes

TAGS_MAX = 4  # of a process
EXPIRES_S = 600.0
JUMPS_S = 300.0  # of the store's clock: a tag may end so much earlier


class Wrong(AssertionError):
    """A tag with other contents."""


class Tags:
    """See the header. `log`: the schema of the log."""

    def __init__(self, name: str, client: ap.Client, log: Any, note: Notes, dice: random.Random) -> None:
        self.name, self.client, self.log, self.note, self.dice = name, client, log, note, dice
        self.number = 0
        self.rows: dict[str, list[Any]] = {}
        """Of the tags that this process was told of."""

    async def step(self) -> None:
        """Add one, drop one, or read one."""
        if len(self.rows) >= TAGS_MAX:
            await self._drop(min(self.rows, key=lambda tag: int(tag.rpartition("-")[2])))
        elif self.rows and self.dice.random() < 0.5:
            await self._read(self.dice.choice(list(self.rows)))
        else:
            await self._add(f"{self.name}-tag-{self.number}")

    async def _add(self, tag: str) -> None:
        self.number += 1
        async with self.client.reader("log", self.log) as reader, reader.snapshot() as snapshot:
            rows = sorted(await snapshot.rows())
            await self.client.tag("log", tag, snapshot.as_of, expires=timedelta(seconds=EXPIRES_S))
        self.rows[tag] = rows
        self.note("told", "tag", tag, str(len(rows)))

    async def _read(self, tag: str) -> None:
        try:
            rows = await rows_of(self.client, self.log, tag)
        except ap.UnknownTag:
            self.note("failed", "tag", tag, "UnknownTag: it has expired")
            del self.rows[tag]
            return
        if rows != self.rows[tag]:
            raise Wrong(f"{tag} has {len(rows)} rows, and had {len(self.rows[tag])}")
        self.note("told", "read", tag, str(len(rows)))

    async def _drop(self, tag: str) -> None:
        del self.rows[tag]
        self.note("dropping", "tag", tag)
        await self.client.untag("log", tag)


async def rows_of(client: ap.Client, log: Any, tag: str) -> list[Any]:
    async with client.reader("log", log) as reader, reader.snapshot(tag=tag) as snapshot:
        return sorted(await snapshot.rows())


async def wrong_tags(client: ap.Client, log: Any, notes: Sequence[Note]) -> AsyncIterator[str]:
    """The tags that are not what their processes were told."""
    told = {note.op: note for note in notes if (note.what, note.kind) == ("told", "tag")}
    dropping = {note.op for note in notes if note.what == "dropping"}
    present = await client.tags("log")
    for tag, note in told.items():
        if tag in present:
            rows = await rows_of(client, log, tag)
            if len(rows) != int(note.text):
                yield f"the tag {tag} has {len(rows)} rows, and had {note.text}"
        elif tag not in dropping and time.monotonic() < note.at + EXPIRES_S - JUMPS_S:
            yield f"the tag {tag} is lost"
