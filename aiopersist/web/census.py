"""The names of the shards of a location, and a summary of each.

Names are there at once. A summary needs a read of the shard's state, and a location may have ten thousand
shards. So a pass in the background reads them, a few at a time; shards on the requested page come first, and
the page says how many were read. Each pass asks for the heads that moved, 256 in a request, and reads only
the states of these again.

Passes run only while somebody requests pages.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from aiopersist.client.client import Client
from aiopersist.maintenance.inspect import GROWTH_MIN_S
from aiopersist.maintenance.overview import ShardSummary, summaries
from aiopersist.shard.catalog import IndexedId, KnownNames, ShardId, id_of
from aiopersist.shard.log import consensus_key
from aiopersist.storage.consensus import sliced

READ_AT_ONCE = 32  # shards; shards that a page waits for come first
HEADS_AT_ONCE = 256  # in one request: their data is in memory
PASS_EVERY_S = 2.0
CONTINUE_S = 30.0  # how long passes continue after the last page
WAIT_S = 0.1  # a page waits this long: most locations are read by then
RATE_S = 60.0  # a rate covers about the last minute


class SeenVersion(NamedTuple):
    """A version of a shard, the bytes of its parts, and when it was read, on the monotonic clock."""

    seqno: int
    bytes: int
    at: float


class Speed(NamedTuple):
    """How much is written to a shard in a second."""

    versions: float
    bytes: float | None
    """Negative after a compaction that made it smaller; `None` before there are enough data."""


class Rate:
    """How many versions and bytes are written to a shard, over about the last minute."""

    def __init__(self, first: SeenVersion) -> None:
        self._from = self._middle = self._last = first

    def add(self, seen: SeenVersion) -> None:
        """A later version."""
        if seen.at - self._middle.at > RATE_S / 2:
            self._from, self._middle = self._middle, seen
        self._last = seen

    def per_s(self, now: float) -> Speed | None:
        """`None` within the first second."""
        watched, before, last = now - self._from.at, self._from, self._last
        if watched < 1:
            return None
        grown = (last.bytes - before.bytes) / watched if watched >= GROWTH_MIN_S else None
        return Speed((last.seqno - before.seqno) / watched, grown)


class Totals(NamedTuple):
    """Sums over shards."""

    bytes: int = 0
    updates: int = 0
    problems: int = 0

    def plus(self, summary: ShardSummary, sign: int = 1) -> "Totals":
        """The sums with one more shard."""
        return Totals(
            self.bytes + sign * summary.bytes,
            self.updates + sign * summary.updates,
            self.problems + sign * (summary.problem is not None),
        )

    def without(self, summary: ShardSummary) -> "Totals":
        """The sums without one shard."""
        return self.plus(summary, -1)


class Census:
    """See the header. One per client."""

    def __init__(self, client: Client) -> None:
        self._stack = client._stack
        self.summaries: dict[str, ShardSummary] = {}
        """By id; of the shards read so far."""
        self.totals = Totals()
        """Their sums."""
        self.problem: str | None = None
        """Why the last pass failed."""
        self.named = False
        """Whether the names were read."""
        self._rates: dict[str, Rate] = {}
        self._names = KnownNames(ShardId), KnownNames(IndexedId)
        self._all_names: list[tuple[str, ShardId]] = []
        self._urgent: dict[ShardId, None] = {}
        self._asked = self._answered = 0
        self._continue_until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._news = asyncio.Event()

    # --- for pages -------------------------------------------------------------------------------

    @property
    def names(self) -> list[tuple[str, ShardId]]:
        """All names, sorted, with the ids of shards and `Indexed`s; both may have the same name. Without
        names whose creator stopped before it created the shard."""
        return [pair for pair in self._all_names if not self._is_missing(pair[1])]

    def _is_missing(self, shard: ShardId) -> bool:
        summary = self.summaries.get(shard)
        return summary is not None and summary.seqno is None and summary.problem is None

    async def look(self) -> None:
        """Wait until the census is as new as this call, but at most `WAIT_S`."""
        self._asked += 1
        asked = self._asked
        self._keep_on()
        await self._until(lambda: self._answered >= asked)

    async def read(self, shards: list[ShardId]) -> None:
        """Read these shards first, and wait for them, but at most `WAIT_S`."""
        unread = [shard for shard in shards if shard not in self.summaries]
        self._urgent.update(dict.fromkeys(unread))
        await self._until(lambda: all(shard in self.summaries for shard in unread))

    def rate(self, shard: str) -> Speed | None:
        """How much is written to the shard; `None` before there are enough data."""
        rate = self._rates.get(shard)
        return None if rate is None else rate.per_s(self._stack.runtime.monotonic())

    async def _until(self, condition: Callable[[], bool]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    await self._news.wait()

    # --- passes ----------------------------------------------------------------------------------

    def _keep_on(self) -> None:
        self._continue_until = self._stack.runtime.monotonic() + CONTINUE_S
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = self._stack.supervisor.background(self._passes(), "read summaries of shards")

    async def _passes(self) -> None:
        """Run passes until no page was requested for `CONTINUE_S`. A pause is at least as long as a pass."""
        runtime = self._stack.runtime
        while (began := runtime.monotonic()) < self._continue_until:
            self._wake.clear()
            asked = self._asked
            try:
                await self._pass()
                self.problem = None
                self._answered = asked
            except Exception as error:  # pages show it, and the next pass tries again
                self.problem = f"{type(error).__name__}: {error}"
            self._tell()
            await runtime.sleep(min(runtime.monotonic() - began, PASS_EVERY_S))
            with suppress(TimeoutError):
                async with asyncio.timeout(PASS_EVERY_S):
                    await self._wake.wait()

    async def _pass(self) -> None:
        """Update everything: a request for every 256 heads, and a read of each shard with a new version."""
        if any([await names.look(self._stack) for names in self._names]) or not self.named:
            self._all_names = sorted(pair for names in self._names for pair in names.ids.items())
            self._forget()
        self.named = True
        self._tell()
        todo = await self._moved()
        while todo:
            first = [shard for shard in self._urgent if shard in todo]
            chosen = list(islice(dict.fromkeys([*first, *todo]), READ_AT_ONCE))
            began = self._stack.runtime.monotonic()
            await self._read([(todo.pop(shard), shard) for shard in chosen])
            if not first:  # give pages a turn: reading states keeps a core busy
                await self._stack.runtime.sleep(self._stack.runtime.monotonic() - began)

    def _forget(self) -> None:
        """Forget the shards that have no name anymore."""
        named = {shard for _, shard in self._all_names}
        for shard in self.summaries.keys() - named:
            self.totals = self.totals.without(self.summaries.pop(shard))
        for shard in self._rates.keys() - named:
            del self._rates[shard]

    async def _moved(self) -> dict[ShardId, str]:
        """The shards with a newer version than their summary, and their names."""
        keys = {consensus_key(shard): (shard, name) for name, shard in self._all_names}
        seqnos = {key: self._seqno(shard) for key, (shard, _) in keys.items()}
        moved: dict[ShardId, str] = {}
        for group in sliced(seqnos, HEADS_AT_ONCE):
            heads = await self._stack.consensus.heads(group)
            new = [key for key in group if key in heads or keys[key][0] not in self.summaries]
            moved.update(keys[key] for key in new)
        return moved

    def _seqno(self, shard: str) -> int | None:
        summary = self.summaries.get(shard)
        return None if summary is None else summary.seqno

    async def _read(self, named: list[tuple[str, ShardId]]) -> None:
        async for summary in summaries(self._stack, named):
            if (before := self.summaries.get(summary.shard_id)) is not None:
                self.totals = self.totals.without(before)
            self.summaries[summary.shard_id] = summary
            self.totals = self.totals.plus(summary)
            self._urgent.pop(id_of(summary.shard_id), None)
            if summary.seqno is not None:
                seen = SeenVersion(summary.seqno, summary.bytes, self._stack.runtime.monotonic())
                self._rates.setdefault(summary.shard_id, Rate(seen)).add(seen)
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
