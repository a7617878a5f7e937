"""What is known of the shards of a location: their names, and a summary of each.

Names are known at once. A summary takes a read of a shard's state, and a location may have ten thousand
shards. So a pass in the background reads them, a few at a time, those first that a page is about to show; a
page says how many have been read by now. A summary stays until its shard has another version: each pass asks
for the heads that moved, some hundred in a request, and reads only these anew.

Passes run while pages are asked for: nobody pays for an inspector that nobody looks at.
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

READ_AT_ONCE = 32  # shards: then those that a page waits for come before the others
HEADS_AT_ONCE = 256  # in one request: their data is in memory
PASS_EVERY_S = 2.0
WANTED_S = 30.0  # how long passes go on behind the last page
WAIT_S = 0.1  # a page waits so long for news: most locations are read by then
RATE_S = 60.0  # a rate is that of about the last minute


class SeenVersion(NamedTuple):
    """A version of a shard that was seen, the bytes of its parts, and when, on the monotonic clock."""

    seqno: int
    bytes: int
    at: float


class Speed(NamedTuple):
    """What a shard gets in a second."""

    versions: float
    bytes: float | None
    """Less than none where a compaction has made it smaller; `None` where it was not watched for long."""


class Rate:
    """How many versions and bytes a shard gets, as far back as it was watched, about a minute."""

    def __init__(self, first: SeenVersion) -> None:
        self._from = self._middle = self._last = first

    def saw(self, seen: SeenVersion) -> None:
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
        """With one shard more."""
        return Totals(
            self.bytes + sign * summary.bytes,
            self.updates + sign * summary.updates,
            self.problems + sign * (summary.problem is not None),
        )

    def without(self, summary: ShardSummary) -> "Totals":
        """With one shard less."""
        return self.plus(summary, -1)


class Census:
    """See the header. One per client."""

    def __init__(self, client: Client) -> None:
        self._stack = client._stack
        self.summaries: dict[str, ShardSummary] = {}
        """By id, as far as they were read."""
        self.totals = Totals()
        """Their sums."""
        self.problem: str | None = None
        """Why the last pass was cut off."""
        self.named = False
        """Whether the names were read by now."""
        self._rates: dict[str, Rate] = {}
        self._known_names = KnownNames(ShardId), KnownNames(IndexedId)
        self._all_names: list[tuple[str, ShardId]] = []
        self._urgent: dict[ShardId, None] = {}
        self._asked = self._answered = 0
        self._wanted_until = 0.0
        self._task: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._news = asyncio.Event()

    # --- for pages -------------------------------------------------------------------------------

    @property
    def names(self) -> list[tuple[str, ShardId]]:
        """All names, sorted, with the ids of shards and `Indexed`s, which may have the same name. One whose
        creator stopped before it made the shard names nothing yet."""
        return [pair for pair in self._all_names if not self._is_unmade(pair[1])]

    def _is_unmade(self, shard: ShardId) -> bool:
        summary = self.summaries.get(shard)
        return summary is not None and summary.seqno is None and summary.problem is None

    async def look(self) -> None:
        """Wait until all is as it was when this call began, or later, but not for long: then a page shows
        what is known."""
        self._asked += 1
        asked = self._asked
        self._keep_on()
        await self._until(lambda: self._answered >= asked)

    async def read(self, shards: list[ShardId]) -> None:
        """Read these shards before all others, and wait for them, but not for long."""
        unread = [shard for shard in shards if shard not in self.summaries]
        self._urgent.update(dict.fromkeys(unread))
        await self._until(lambda: all(shard in self.summaries for shard in unread))

    def rate(self, shard: str) -> Speed | None:
        """What the shard gets; `None` if it was not watched for long enough."""
        rate = self._rates.get(shard)
        return None if rate is None else rate.per_s(self._stack.runtime.monotonic())

    async def _until(self, condition: Callable[[], bool]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                while not condition():
                    await self._news.wait()

    # --- passes ----------------------------------------------------------------------------------

    def _keep_on(self) -> None:
        self._wanted_until = self._stack.runtime.monotonic() + WANTED_S
        self._wake.set()
        if self._task is None or self._task.done():
            self._task = self._stack.supervisor.background(self._passes(), "read summaries of shards")

    async def _passes(self) -> None:
        """Passes, until nobody has asked for a while. Between two of them is at least the time that one
        takes."""
        runtime = self._stack.runtime
        while (began := runtime.monotonic()) < self._wanted_until:
            self._wake.clear()
            asked = self._asked
            try:
                await self._pass()
                self.problem = None
                self._answered = asked
            except Exception as error:  # the pages say so, and the next pass tries again
                self.problem = f"{type(error).__name__}: {error}"
            self._tell()
            await runtime.sleep(min(runtime.monotonic() - began, PASS_EVERY_S))
            with suppress(TimeoutError):
                async with asyncio.timeout(PASS_EVERY_S):
                    await self._wake.wait()

    async def _pass(self) -> None:
        """Bring all up to date. The requests for names, one for every few hundred heads, and a read of each
        shard that has another version."""
        if any([await known.look(self._stack) for known in self._known_names]) or not self.named:
            self._all_names = sorted(pair for known in self._known_names for pair in known.ids.items())
            self._forget()
        self.named = True
        self._tell()
        todo = await self._moved()
        while todo:
            first = [shard for shard in self._urgent if shard in todo]
            chosen = list(islice(dict.fromkeys([*first, *todo]), READ_AT_ONCE))
            began = self._stack.runtime.monotonic()
            await self._read([(todo.pop(shard), shard) for shard in chosen])
            if not first:  # pages have their turn: reading states keeps a core busy
                await self._stack.runtime.sleep(self._stack.runtime.monotonic() - began)

    def _forget(self) -> None:
        """Forget the shards that have no name any more."""
        there = {shard for _, shard in self._all_names}
        for gone in self.summaries.keys() - there:
            self.totals = self.totals.without(self.summaries.pop(gone))
        for gone in self._rates.keys() - there:
            del self._rates[gone]

    async def _moved(self) -> dict[ShardId, str]:
        """The shards that have another version than their summary, and their names."""
        keys = {consensus_key(shard): (shard, name) for name, shard in self._all_names}
        known = {key: self._known(shard) for key, (shard, _) in keys.items()}
        moved: dict[ShardId, str] = {}
        for some in sliced(known, HEADS_AT_ONCE):
            found = await self._stack.consensus.heads(some)
            new = [key for key in some if key in found or keys[key][0] not in self.summaries]
            moved.update(keys[key] for key in new)
        return moved

    def _known(self, shard: str) -> int | None:
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
                self._rates.setdefault(summary.shard_id, Rate(seen)).saw(seen)
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
