"""A feed: the changes of a table, old and new val paired, in order of time; at first its contents.

The contents come in steps of bounded size, in key order. A cursor within them says their time and the last
key. Behind them the feed is a listen whose updates are paired by key and time: a table has at most one val
per key, so at each time a key has at most one retraction and one insertion.
"""

from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

from aiopersist.data.lazy import pa
from aiopersist.data.updates.consolidate import sort_and_consolidate
from aiopersist.errors import InvalidUsage, NotReadable, UsageKind, shown
from aiopersist.frontier import Antichain, minimum
from aiopersist.read.cursor import text_of, values_of
from aiopersist.read.handle import ReadHandle
from aiopersist.read.listen import Listen, Steps
from aiopersist.read.snapshot import Items, Snapshot
from aiopersist.resource import Resource
from aiopersist.shard.instant import as_int
from aiopersist.table.filters import after, any_key
from aiopersist.table.kind import Kind
from aiopersist.table.open import OpenTable

if TYPE_CHECKING:
    from collections.abc import Awaitable

K = TypeVar("K")
V = TypeVar("V")

FORM = "contents."  # the beginning of cursors within the contents; no other cursor has a dot


class Change(NamedTuple, Generic[K, V]):
    """At `time` the val of `key` went from `old` to `new`; `None` stands for absent."""

    key: K
    old: V | None
    new: V | None
    time: int


@dataclass(frozen=True, slots=True)
class FeedStep(Generic[K, V]):
    """Some changes, and where the feed stands behind them."""

    changes: list[Change[K, V]]
    """In order of time, then of keys."""
    upper: Antichain
    """Everything before it was delivered."""
    cursor: str
    """A text by which a feed goes on behind this step."""
    contents: bool
    """Whether the changes are the contents at the beginning."""


class _Within(NamedTuple):
    """A position within the contents at `as_of`: behind the key of that text."""

    as_of: int
    last: str | None


class Feed(Resource, Generic[K, V]):
    """An async iterator of `FeedStep`. It opens when it is entered, or at its first step. A wait may be
    cancelled and repeated."""

    def __init__(
        self,
        opened: "Callable[[], Awaitable[OpenTable]]",
        kind: Kind[K, V],
        cursor: str | None,
        as_of: int | datetime | None,
        start: str | None,
        keys: Iterable[K] | None,
    ) -> None:
        if cursor is not None and not isinstance(cursor, str):
            raise InvalidUsage(UsageKind.INVALID_CURSOR, f"{shown(cursor)} is no text")
        if start not in (None, "now"):
            raise InvalidUsage(UsageKind.INVALID_TIME, f"start={shown(start)}: 'now' or None", time=start)
        if sum(given is not None for given in (cursor, as_of, start)) > 1:
            raise InvalidUsage(UsageKind.INVALID_CURSOR, "give one of cursor, as_of and start")
        self._opened = opened
        self._kind = kind
        self._given = cursor, as_of, start
        self._keys = None if keys is None else list(keys)
        self._texts = None if self._keys is None else frozenset(kind.key_texts(self._keys))
        self._within: _Within | None = None
        """Where it stands within the contents, as long as these come."""
        self._snapshot: Snapshot[K, V] | None = None
        """What the contents come from. It is closed behind them: it keeps blobs."""
        self._contents: Items[Any] | None = None
        self._batch: Any = None
        """The next batch of the contents, read ahead: so that the last one is known."""
        self._listen: Listen[K, V] | None = None
        self._steps: Steps[K, V] | None = None
        self._held = AsyncExitStack()
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FeedStep[K, V]:
        await self._open()
        if self._contents is not None:
            return await self._next_contents()
        if self._snapshot is not None:
            await self._snapshot.aclose()
            self._snapshot = None
        assert self._steps is not None
        step = await anext(self._steps)
        changes = self._paired(step.updates.to_arrow())
        return FeedStep(changes, step.upper, step.cursor, contents=False)

    @property
    def cursor(self) -> str:
        """A text by which a feed goes on where this one stands."""
        if self._listen is None:
            raise InvalidUsage(UsageKind.CLOSED, "the feed was not entered yet")
        if self._within is not None:
            return _encoded(self._listen._fetch.shard.id, self._within)
        return self._listen.cursor

    async def aclose(self) -> None:
        """Stop; idempotent."""
        self._closed = True
        await self._held.aclose()

    # --- inside ----------------------------------------------------------------------------------

    async def _open(self) -> None:
        if self._closed:
            raise InvalidUsage(UsageKind.CLOSED, "the feed is closed")
        if self._listen is not None:
            return
        table = await self._opened()
        handle: ReadHandle[K, V] = ReadHandle(table.reading)
        cursor, as_of, start = self._given
        async with AsyncExitStack() as held:
            if cursor is not None and not cursor.startswith(FORM):
                listen = await held.enter_async_context(handle.listen(cursor=cursor))
            elif start == "now":
                listen = await held.enter_async_context(handle.listen())
            else:
                within = None if cursor is None else _decoded(cursor, table.shard.id)
                listen = await self._begin(handle, within, as_of, held)
            self._held = held.pop_all()
        self._listen, self._steps = listen, listen.steps()

    async def _begin(
        self,
        handle: ReadHandle[K, V],
        within: _Within | None,
        as_of: int | datetime | None,
        held: AsyncExitStack,
    ) -> Listen[K, V]:
        """Open a snapshot and, behind it, a listen; no snapshot if nothing was ever put."""
        at = as_of if within is None else within.as_of
        try:
            snapshot: Snapshot[K, V] = await held.enter_async_context(handle.snapshot(at))
        except NotReadable as error:
            if error.as_of is not None:
                raise
            listen = await handle.listen()
            if listen.frontier == minimum(None):
                return await held.enter_async_context(listen)
            await listen.aclose()  # the first put came meanwhile
            return await self._begin(handle, within, as_of, held)
        self._snapshot = snapshot
        listen = await held.enter_async_context(handle.listen(snapshot.as_of))
        last = None if within is None else within.last
        self._within = _Within(as_int(snapshot.as_of), last)
        schema = self._kind.schema
        found = [] if last is None else [after(schema, self._kind.keys([last])[0])]
        found += [] if self._keys is None else [any_key(schema, self._keys)]
        self._contents = snapshot.batches(found[0] & found[1] if len(found) == 2 else next(iter(found), None))
        return listen

    async def _next_contents(self) -> FeedStep[K, V]:
        """The next step of the contents. What was read stays here if the wait for more is cancelled."""
        assert self._contents is not None
        assert self._within is not None
        assert self._listen is not None
        if self._batch is None:
            self._batch = await anext(self._contents, None)
        while (following := await anext(self._contents, None)) is not None and self._is_small(following):
            self._batch = pa.Table.from_batches([*_batches(self._batch), following])
        batch, self._batch, as_of = self._batch, following, self._within.as_of
        changes: list[Change[K, V]] = []
        if batch is not None:
            keys = self._kind.schema.key.decode(batch.column("key"))
            vals = self._kind.schema.val.decode(batch.column("val"))
            changes = [Change(key, None, val, as_of) for key, val in zip(keys, vals, strict=True)]
            self._within = _Within(as_of, self._kind.key_text(keys[-1]))
        if following is None:
            self._contents = self._within = None
        at = as_of + 1 if self._within is None else as_of
        return FeedStep(changes, Antichain(at), self.cursor, contents=True)

    def _is_small(self, following: "pa.RecordBatch") -> bool:
        """Whether the next batch fits into this step: merging ends with batches of a row."""
        assert self._listen is not None
        bytes_max: int = self._listen._fetch.stack.settings.row_group_bytes
        return bool(self._batch.nbytes + following.nbytes <= bytes_max)

    def _paired(self, updates: "pa.Table") -> list[Change[K, V]]:
        """The updates as changes, in order of time."""
        if not updates.num_rows:
            return []
        net = sort_and_consolidate(updates, self._kind.schema)
        keys, vals = (field.decode(net.column(name)) for name, field in self._kind.columns())
        texts, _ = self._kind.texts(net)
        times, diffs = net.column("time").to_pylist(), net.column("diff").to_pylist()
        found: dict[tuple[int, str], Change[K, V]] = {}
        for text, key, val, time, diff in zip(texts, keys, vals, times, diffs, strict=True):
            if self._texts is None or text in self._texts:
                change = found.get((time, text)) or Change(key, None, None, time)
                side = {"new": val} if diff > 0 else {"old": val}
                found[time, text] = change._replace(**side)
        return sorted(found.values(), key=lambda change: change.time)


def _batches(some: "pa.RecordBatch | pa.Table") -> "list[pa.RecordBatch]":
    return [some] if isinstance(some, pa.RecordBatch) else some.to_batches()


def _encoded(shard: str, within: _Within) -> str:
    return FORM + text_of([1, shard, *within])


def _decoded(text: str, shard: str) -> _Within:
    try:
        version, found, as_of, last = values_of(text.removeprefix(FORM))
        if version != 1:
            raise ValueError("version")
    except (ValueError, TypeError) as error:
        text = f"{shown(text, 40)} is no cursor of this version"
        raise InvalidUsage(UsageKind.INVALID_CURSOR, text) from error
    if found != shard:
        text = f"the cursor is of shard {found}, not of {shard}"
        raise InvalidUsage(UsageKind.INVALID_CURSOR, text)
    return _Within(int(as_of), last)
