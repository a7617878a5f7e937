"""The updates of a shard in steps, from any position on: perhaps its contents, then all later updates.

The contents come in steps of bounded size, in the order of rows. A position within them has their time and
the last delivered key. A step ends after the last row of a key, unless all its rows have one key.

If a key has more rows than a step, or if keys are too long or have no order, the position counts the rows
that were delivered from some key on. Contents at one time never change, whatever compaction does. So a later
read can skip these rows, if the schema and the choice of keys are the same.

After the contents comes a listen. Its steps are bounded, but one time is never divided. Int times only.

If a store does not answer, the wait fails. The next one continues after the last step.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from aiopersist.base.errors import InvalidUsage, NotReadable, StorageUnavailable, UsageKind
from aiopersist.base.frontier import Antichain, minimum, successor
from aiopersist.base.resource import Resource
from aiopersist.data.arrays import empty_table
from aiopersist.data.jsonable import column_from_texts, column_texts
from aiopersist.data.lazy import pa
from aiopersist.data.part.keys import at_or_beyond, has_conditions, is_key
from aiopersist.data.updates.assemble import at_time
from aiopersist.data.updates.merge import rows_of_last_key
from aiopersist.read.cut import CutBatches, batches_in
from aiopersist.read.handle import ReadHandle, listen_from
from aiopersist.read.listen import Listen, Steps, bound_steps, check_with
from aiopersist.read.places import cursor_of, within_of_session
from aiopersist.read.session import ReadSession
from aiopersist.read.snapshot import Snapshot
from aiopersist.shard.instant import as_int
from aiopersist.shard.stack import Stack
from aiopersist.state.model import State
from aiopersist.state.position import Position, WithinContents

if TYPE_CHECKING:
    from pyarrow.compute import Expression  # type: ignore[import-untyped]  # pyarrow ships no stubs

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")

STEP_GROUPS = 4  # row groups in a step at most; a key or a time is not divided if possible
LISTEN_GROUPS = 2  # row groups of updates that a bounded feed reads ahead
KEY_CHARS_MAX = 1024  # of the key in a position, which is part of cursors and of subscriptions' states


class UpdatesStep(NamedTuple):
    """Some updates, and the position after them."""

    updates: "pa.Table"
    """Columns `key`, `val`, `time`, `diff`. Contents are at their time, in the order of rows."""
    position: Position
    cursor: str
    contents: bool

    @property
    def upper(self) -> Antichain:
        """Everything before it was delivered."""
        return self.position.frontier


class UpdateFeed(Resource, Generic[K, V]):
    """See the header. Call one of the `open_` methods first. A wait may be cancelled and repeated. `where`
    filters the contents, by keys; `chosen` identifies this filter. `step_bytes`: the size of a step."""

    def __init__(
        self,
        session: ReadSession[K, V],
        where: "Expression | None" = None,
        chosen: str = "",
        step_bytes: int | None = None,
    ) -> None:
        self._session = session
        self._schema_id, self._chosen = session.fetch.schema_id, chosen
        self._handle: ReadHandle[K, V] = ReadHandle(session)
        self._where = where
        group_bytes = session.fetch.stack.settings.row_group_bytes
        self._step_bytes = STEP_GROUPS * group_bytes if step_bytes is None else step_bytes
        self._joined_bytes = min(self._step_bytes, group_bytes)
        self._ahead_bytes = None if step_bytes is None else LISTEN_GROUPS * group_bytes
        self._turns = None if step_bytes is None else session.fetch.stack.turns
        self._exits = AsyncExitStack()
        self._snapshot: Snapshot[K, V] | None = None
        """The source of the contents, closed after the last one. After `open_at`, the first step opens it."""
        self._contents: CutBatches | None = None
        self._batch: Any = None
        """The next batch of the contents, read ahead to recognize the last one."""
        self._within: WithinContents | None = None
        """The position within the contents; `None` after them."""
        self._skipped = 0
        """Rows before the position that were read again and skipped."""
        self._listen: Listen[K, V] | None = None
        self._steps: Steps[K, V] | None = None
        self._taking = asyncio.Lock()
        self._undelivered: UpdatesStep | None = None
        """A step whose wait was cancelled."""
        self._last: UpdatesStep | None = None
        """The last delivered step, without its updates."""
        self._closed = False

    # --- opening ---------------------------------------------------------------------------------

    async def open_contents(self, as_of: int | datetime | None = None) -> None:
        """Begin with the contents now or at `as_of`; with later updates, if nothing was ever written."""
        async with AsyncExitStack() as exits:
            listen = await self._snapshot_and_listen(as_of, None, exits)
            self._adopt(listen, exits)

    async def open_now(self) -> None:
        """Begin at the upper."""
        async with AsyncExitStack() as exits:
            self._adopt(await exits.enter_async_context(self._handle.listen()), exits)

    async def open_cursor(self, cursor: str) -> None:
        """Continue after the step of that cursor."""
        within = within_of_session(cursor, self._session)
        self._check_counted(within)
        async with AsyncExitStack() as exits:
            if within is None:
                listen = await exits.enter_async_context(self._handle.listen(cursor=cursor))
            else:
                listen = await self._snapshot_and_listen(within.as_of, within, exits)
            self._adopt(listen, exits)

    async def open_at(self, position: Position) -> None:
        """Continue at `position`. Until the next step is delivered, the caller holds its history."""
        self._within = within = position.contents
        self._check_counted(within)
        frontier = position.frontier if within is None else successor(within.as_of)
        async with AsyncExitStack() as exits:
            self._adopt(await exits.enter_async_context(await listen_from(self._handle, frontier)), exits)

    async def _snapshot_and_listen(
        self, as_of: int | datetime | None, within: WithinContents | None, exits: AsyncExitStack
    ) -> Listen[K, V]:
        """Open a snapshot and, behind it, a listen; no snapshot if nothing was ever written."""
        await self._ready_to_filter(within)
        try:
            snapshot: Snapshot[K, V] = await exits.enter_async_context(self._handle.snapshot(as_of))
        except NotReadable as error:
            if error.as_of is not None:
                raise
            listen = await self._handle.listen()
            if listen.frontier == minimum(None):
                return await exits.enter_async_context(listen)
            await listen.aclose()  # the first append came meanwhile
            return await self._snapshot_and_listen(as_of, within, exits)
        listen = await exits.enter_async_context(self._handle.listen(snapshot.as_of))
        self._within = within or WithinContents(as_of=as_int(snapshot.as_of))
        self._read(snapshot)
        return listen

    def _check_counted(self, within: WithinContents | None) -> None:
        """`INVALID_CURSOR` unless a counted position selects the same rows: after all rows of a key, the keys
        must be the same; else the rows."""
        if within is None or within.schema_id is None:
            return
        is_alike = (within.schema_id, within.chosen) == (self._schema_id, self._chosen)
        if not is_alike and not (within.is_key_done and self._has_keys_of(within.schema_id)):
            text = "the position counts rows under another schema, or with another choice of keys"
            raise InvalidUsage(UsageKind.INVALID_CURSOR, f"{text}: use the same ones, or start again")

    def _has_keys_of(self, schema_id: int) -> bool:
        """Whether the keys of that schema have the same type: with fewer fields, several keys become one."""
        shard, key = self._session.shard, self._session.schema.arrow_schema.field("key")
        is_known = schema_id in shard.state.schemas
        return is_known and bool(shard.schema(schema_id).arrow_schema.field("key").equals(key))

    async def _ready_to_filter(self, within: WithinContents | None) -> None:
        """Import the module for the filters of `_rest`, on a worker thread."""
        if self._where is not None or (within is not None and within.key is not None):
            await self._session.shard.stack.imported("pyarrow.acero")

    def _read(self, snapshot: Snapshot[K, V]) -> None:
        self._snapshot = snapshot
        self._contents = CutBatches(snapshot.batches(self._rest()), self._step_bytes)
        self._batch, self._skipped = None, 0

    async def _open_snapshot(self, as_of: int) -> None:
        """Open the source of the contents. Closes it at once if the feed was closed meanwhile."""
        if self._snapshot is not None:  # a read of it failed
            self._read(self._snapshot)
            return
        await self._ready_to_filter(self._within)
        snapshot: Snapshot[K, V] = await self._handle.snapshot(as_of)
        self._exits.push_async_exit(snapshot)
        self._read(snapshot)
        if self._closed:
            await self._exits.aclose()

    def _adopt(self, listen: Listen[K, V], exits: AsyncExitStack) -> None:
        bound_steps(listen, self._step_bytes, self._ahead_bytes)
        self._exits, self._listen, self._steps = exits.pop_all(), listen, listen.steps()

    def _rest(self) -> "Expression | None":
        """The rows of the contents from the key of the position on."""
        where = self._where
        assert self._within is not None
        if self._within.key is None:
            return where
        rest = at_or_beyond(self._scalar(self._within.key))
        return rest if where is None else rest & where

    def _scalar(self, key: str) -> "pa.Scalar":
        return column_from_texts([key], self._session.schema.key.codec.arrow_type)[0]

    # --- steps -----------------------------------------------------------------------------------

    @property
    def position(self) -> Position:
        """The position after the last delivered step."""
        if self._last is not None:
            return self._last.position
        assert self._listen is not None
        if self._within is not None:
            return Position(frontier=Antichain(self._within.as_of), contents=self._within)
        return Position(frontier=self._listen.frontier)

    @property
    def cursor(self) -> str:
        """`position` as text: another feed continues from there."""
        return self._cursor if self._last is None else self._last.cursor

    @property
    def _cursor(self) -> str:
        assert self._listen is not None
        if self._within is not None:
            return cursor_of(self._session.shard.id, self._within)
        return self._listen.cursor

    def check_with(self, check: Callable[[State], None]) -> None:
        """Call `check` with each newer state during a wait; its error ends the wait and the feed."""
        assert self._listen is not None
        check_with(self._listen, check)

    @property
    def stack(self) -> Stack:
        return self._session.fetch.stack

    @property
    def version(self) -> int:
        """The newest version of the shard that this process has seen."""
        state = self._session.shard.register.state
        assert state is not None  # it was opened
        return state.seqno

    async def left_behind(self, version: int) -> None:
        """Return when the shard has a version beyond `version`. The wait may be cancelled."""
        await self._session.shard.register.wait(lambda state: state if state.seqno > version else None)

    def anew(self) -> "UpdateFeed[K, V]":
        """Another feed of the same rows, not opened yet."""
        return UpdateFeed(self._session, self._where, self._chosen)

    def let_go(self) -> None:
        """Free contents that were read ahead, unless a call waits for a step. The next one reads again."""
        self.stack.turns.forget(self.let_go)
        if self._contents is not None and not self._taking.locked():
            self.stack.supervisor.spawn(self._let_go(), "free contents that were read ahead", abandon=True)

    async def _let_go(self) -> None:
        async with self._taking:
            if self._undelivered is None and (contents := self._contents) is not None:
                self._contents = self._batch = None
                await contents.aclose()

    async def next(self, form: Callable[[UpdatesStep], T]) -> T:
        """The next step, converted by `form`, on a worker thread unless it has few rows. `StopAsyncIteration`
        after the last step of a shard whose upper is empty."""
        async with self._taking:
            if self._undelivered is None:
                self._undelivered = await self._next()
            result = await self._session.fetch.stack.compute_rows(
                self._undelivered.updates, form, self._undelivered
            )
            empty = empty_table(self._session.schema.arrow_schema)
            self._last, self._undelivered = self._undelivered._replace(updates=empty), None
            return result

    async def _next(self) -> UpdatesStep:
        if self._within is not None and self._contents is None:
            await self._open_snapshot(self._within.as_of)
        if self._contents is not None:
            async with self._turns.turn(self.let_go) if self._turns else nullcontext():
                return await self._next_contents()
        if self._snapshot is not None:
            await self._snapshot.aclose()
            self._snapshot = None
        assert self._steps is not None
        step = await anext(self._steps)
        return UpdatesStep(
            step.updates.to_arrow(), Position(frontier=step.upper), step.cursor, contents=False
        )

    async def _next_contents(self) -> UpdatesStep:
        """The next step of the contents. Rows that were read stay here if the wait for more is cancelled."""
        assert self._contents is not None
        assert self._within is not None
        if self._batch is None:
            self._batch = await self._next_batch()
        while (following := await self._following()) is not None and self._joins(following):
            self._batch = pa.Table.from_batches([*batches_in(self._batch), following])
        (batch, self._batch), as_of = self._cut(self._batch, following), self._within.as_of
        schema = self._session.schema
        updates = empty_table(schema.arrow_schema) if batch is None else at_time(batch, as_of, schema)
        if following is None:
            self._contents = self._within = None
            position = Position(frontier=successor(as_of))
        else:
            self._within = self._behind(updates)
            position = Position(frontier=Antichain(as_of), contents=self._within)
        return UpdatesStep(updates, position, self._cursor, contents=True)

    async def _next_batch(self) -> "pa.RecordBatch | None":
        """The first batch with rows after the position."""
        while (batch := await self._following()) is not None:
            skipped = self._rows_before(batch)
            if batch.num_rows > skipped:
                return batch.slice(skipped)
            self._skipped += skipped
        return None

    async def _following(self) -> "pa.RecordBatch | None":
        """The next batch of the contents. If a store does not answer, the next call reads them again."""
        assert self._contents is not None
        try:
            return await self._contents.next()
        except StorageUnavailable:
            contents, self._contents = self._contents, None
            await contents.aclose()
            raise

    def _rows_before(self, batch: "pa.RecordBatch") -> int:
        """How many rows of the batch, one of the first, lie before the position."""
        assert self._within is not None
        if self._within.is_key_done and self._within.key is not None:
            return int(batch.filter(is_key(self._scalar(self._within.key))).num_rows)
        return min(self._within.past - self._skipped, int(batch.num_rows))

    def _cut(self, batch: Any, following: Any) -> tuple[Any, Any]:
        """The rows of the next step, and the rows that wait. If the last key continues in `following`, its
        rows wait, too, unless the step would be empty."""
        if batch is None or following is None:
            return batch, following
        key, number = self._key_of(batch, batch.num_rows - 1), batch.num_rows
        if key is None or key != self._key_of(following, 0) or (end := number - rows_of_last_key(batch)) == 0:
            return batch, following
        return batch.slice(0, end), pa.Table.from_batches([*batches_in(batch.slice(end)), following])

    def _behind(self, updates: "pa.Table") -> WithinContents:
        """The position after `updates`, before the rows that wait."""
        assert self._within is not None
        rows = self._within.rows + updates.num_rows
        before = self._within.replace(rows=rows, schema_id=self._schema_id, chosen=self._chosen)
        key = self._key_of(updates, updates.num_rows - 1)
        if key is None:
            return before.replace(past=before.past + updates.num_rows, is_key_done=False)
        past = rows_of_last_key(updates) + (before.past if key == before.key else 0)
        return before.replace(key=key, is_key_done=key != self._key_of(self._batch, 0), past=past)

    def _key_of(self, rows: Any, number: int) -> str | None:
        """The key of a row as text; `None` if a position cannot name it, since it is long or has no order."""
        if not has_conditions(self._session.schema.key.codec.arrow_type):
            return None
        (key,) = column_texts(rows.column("key").slice(number, 1))
        return key if len(key) <= KEY_CHARS_MAX else None

    def _joins(self, following: "pa.RecordBatch") -> bool:
        """Whether the next batch belongs to this step: small batches are joined, and a step of a single key
        gets all its rows unless they are too many."""
        size = self._batch.nbytes + following.nbytes
        if size <= self._joined_bytes or size > STEP_GROUPS * self._joined_bytes:
            return bool(size <= self._joined_bytes)
        key = self._key_of(self._batch, 0)
        last = self._key_of(self._batch, self._batch.num_rows - 1)
        return key is not None and key == last == self._key_of(following, 0)

    async def aclose(self) -> None:
        """Stop; idempotent."""
        self._closed = True
        self.stack.turns.forget(self.let_go)
        await self._exits.aclose()
