"""The contents of a stream at one moment: its trace, then the unsealed updates from the trace's upper on.

A snapshot pins one durable state, without an await in between. The blobs of that state stay until the
snapshot is closed, even if they are compacted, deleted or destroyed meanwhile.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Generic, NamedTuple, TypeVar

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.base.frontier import TIME_MAX, Antichain, frontier, shaped
from aiopersist.base.resource import Scope, run_bounded
from aiopersist.data.lazy import pa
from aiopersist.data.updates.assemble import concat
from aiopersist.data.updates.times import advance, filter_times
from aiopersist.data.updates.updates import Update, Updates
from aiopersist.indexed.arrangement import unsealed_between
from aiopersist.parts.fetch import Fetch, Named, Selection
from aiopersist.parts.named_parts import of_trace, of_unsealed
from aiopersist.read.puller import Items
from aiopersist.read.snapshot import PinnedRead
from aiopersist.shard.hold import SharedHold
from aiopersist.state.streams import Arrangement

K = TypeVar("K")
V = TypeVar("V")

UNBOUNDED = Antichain()
DECODE_ROWS = 4096  # rows to decode at once


class StreamSource(NamedTuple):
    """A part; its updates count from `lower` on (`None`: all of them)."""

    named: Named
    lower: Antichain | None
    weight: int
    """About how many of its updates count."""


class StreamSnapshot(PinnedRead, Generic[K, V]):
    """The contents of a stream: everything up to command `seqno`, and nothing later. Times are advanced to
    `since`. Close it to release its blobs."""

    def __init__(
        self, scope: Scope, fetch: Fetch, hold: SharedHold, arrangement: Arrangement, seqno: int
    ) -> None:
        super().__init__(scope, fetch, hold, fetch.shard.state.seqno)
        self.seqno = seqno
        self.since = Antichain(arrangement.since)
        self.seal = Antichain(arrangement.seal)
        self._arrangement = arrangement

    async def rows(self) -> list[Update[K, V, int]]:
        """All updates, perhaps not consolidated: those of the trace, then the others. One request per part
        that is not inline."""
        with self._scope.call():
            trace, unsealed = self._parts()
            tables = [await self._table(trace, None), await self._table(unsealed, self._trace_upper)]
            table = advance(concat(tables, self._fetch.schema), self.since)
            return await self._decoded(table)

    def split(self, n: int) -> list["Items[Update[K, V, int]]"]:
        """`rows` as `n` async iterators of about equal length; every update is in one of them. They may run
        at the same time, and each needs memory for a row group."""
        self._scope.check()
        if type(n) is not int or n < 1:
            text = f"cannot split into {shown(n)}: give an int of at least 1"
            raise InvalidUsage(UsageKind.INVALID_BOUNDS, text)
        trace, unsealed = self._parts()
        sources = [StreamSource(named, None, max(named[1].rows, 1)) for named in trace]
        sources += [StreamSource(named, self._trace_upper, self._expected(named)) for named in unsealed]
        ends = list(accumulate((source.weight for source in sources), initial=0))
        cuts = [ends[-1] * number // n for number in range(n + 1)]
        return [self._iteration(self._rows_between(sources, ends, *cut)) for cut in pairwise(cuts)]

    async def trace_rows(self) -> Updates[K, V, int]:
        """The updates of the trace at their stored times, for inspection."""
        with self._scope.call():
            return Updates(await self._table(self._parts()[0], None), self._fetch.schema)

    async def unsealed_rows(
        self, lower: Antichain | int = 0, upper: Antichain | int = UNBOUNDED
    ) -> Updates[K, V, int]:
        """The updates of the unsealed batches at stored times in `[lower, upper)`, even those that are in the
        trace and not evicted yet. `INVALID_BOUNDS` if `upper` is before `lower`."""
        with self._scope.call():
            first, end = shaped(lower, None), shaped(upper, None)
            if not first <= end:
                text = f"upper {end} is before lower {first}"
                raise InvalidUsage(UsageKind.INVALID_BOUNDS, text, lower=first, upper=end)
            batches = [] if first == end else unsealed_between(self._arrangement, _int(first), _upper(end))
            table = await self._table(of_unsealed(batches), first, end)
            return Updates(table, self._fetch.schema)

    @property
    def _trace_upper(self) -> Antichain:
        return Antichain(self._arrangement.trace_upper)

    def _parts(self) -> tuple[list[Named], list[Named]]:
        self._hold.check(self._reader)
        unsealed = unsealed_between(self._arrangement, self._arrangement.trace_upper)
        return of_trace(self._arrangement.trace.values()), of_unsealed(unsealed)

    async def _table(
        self, parts: Sequence[Named], lower: Antichain | None, upper: Antichain | None = None
    ) -> "pa.Table":
        selection = Selection(lower=lower, upper=upper if upper is not None and upper.elements else None)
        settings = self._fetch.stack.settings
        jobs = [partial(self._fetch.table, group, selection, self._reader) for group in _in_order(parts)]
        return concat(await run_bounded(settings.fetch_max_outstanding_parts, jobs), self._fetch.schema)

    async def _decoded(self, table: "pa.Table") -> list[Update[K, V, int]]:
        return await self._fetch.stack.compute_few(table.nbytes, Updates(table, self._fetch.schema).rows)

    def _expected(self, named: Named) -> int:
        """About how many updates of an unsealed part are not in the trace, as if times were spread evenly."""
        batch, part = named
        (least, *_), (end, *_) = batch.lower.elements, (*batch.upper.elements, TIME_MAX + 1)
        assert isinstance(least, int)
        assert isinstance(end, int)
        first = max(least, self._arrangement.trace_upper)
        return max(part.rows * (end - first) // (end - least), 1)

    async def _rows_between(
        self, sources: list[StreamSource], ends: list[int], start: int, stop: int
    ) -> AsyncGenerator[Update[K, V, int], None]:
        """The updates from `start` to `stop` in the sequence of all sources, each as long as its weight."""
        for (named, lower, weight), first in zip(sources, ends, strict=False):
            rows = range(*(_row(cut - first, weight, named[1].rows) for cut in (start, stop)))
            if not rows:
                continue
            async with aclosing(self._fetch.raw_slabs(named[1], self._reader, rows)) as slabs:
                async for slab in slabs:
                    kept = advance(filter_times(slab, lower=lower), self.since)
                    for at in range(0, kept.num_rows, DECODE_ROWS):
                        for update in await self._decoded(kept.slice(at, DECODE_ROWS)):
                            yield update

    def __repr__(self) -> str:
        return f"<StreamSnapshot at seqno {self.seqno}: since {self.since}, seal {self.seal}>"


def _row(at: int, weight: int, rows: int) -> int:
    """The row of a source at that distance from its begin; neighbouring ranges agree on it."""
    return min(max(at, 0), weight) * rows // weight


def _in_order(parts: Sequence[Named]) -> list[list[Named]]:
    """Parts that are fetched together: neighbouring inline parts, or one blob."""
    return [list(group) for _, group in groupby(parts, key=lambda named: named[1].key)]


def _int(bound: Antichain) -> int:
    time = frontier(bound).time
    assert isinstance(time, int)  # not the empty frontier: an upper is beyond it
    return time


def _upper(bound: Antichain) -> int | None:
    return _int(bound) if bound.elements else None
