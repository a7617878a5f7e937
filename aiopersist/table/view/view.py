"""The contents of a table by key, as of the newest upper that this process knows.

The upper of a view never moves back. To *catch up* with a newer state, the view fetches the updates since its
upper. It applies own commits without reading them.

A *resident* view has all contents in memory, below `settings.table_resident_bytes`. Any other view has a part
of them (`contents.py`) and looks up other keys in the shard as of its base (`lookup.py`). A hold keeps the
history at the base.

- A caller that needs keys *keeps* them, and fetches those that are not in memory. A kept key stays in memory
  unless the view begins anew; the caller checks that before it goes on.
- While a look-up waits, a key may change and get its new value, or the view may begin anew. So the result is
  used only for keys that are still missing, and only if the view has not begun anew.
- The base moves forward in two cases: to save memory; and after a compaction has merged recent parts with
  older ones, so that a look-up reads few parts. Results do not depend on the base.
- If new batches are too large to read, the view begins anew behind them, without any key.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from math import inf
from typing import Any

from aiopersist.base.errors import LeaseExpired, ShardFinalized, SinceViolation
from aiopersist.base.frontier import Antichain, last_before, minimum
from aiopersist.data.jsonable import SLICE_ROWS
from aiopersist.data.lazy import pa
from aiopersist.read.interval import hold_for, parts_since
from aiopersist.read.session import ReadSession
from aiopersist.read.snapshot import Snapshot, updates_of
from aiopersist.shard.hold import HistoryPin
from aiopersist.shard.instant import as_int
from aiopersist.state.model import State
from aiopersist.table.schema import TableSchema
from aiopersist.table.view.contents import (
    ChangedKeys,
    Contents,
    FullView,
    KeysInUse,
    PartialView,
    contents_at_most,
    is_too_large,
    may_fit,
    next_base,
    surely_fits,
)
from aiopersist.table.view.lookup import LookUps, add_all, full_view_of, look_up


class View:
    """See the header. `resident`: whether it has all contents; `None`: their size decides."""

    def __init__(
        self, table_schema: TableSchema[Any, Any], session: ReadSession[Any, Any], resident: bool | None
    ) -> None:
        self.table_schema = table_schema
        self.session = session
        self.resident = resident
        self.upper = minimum(None)
        """Everything before this frontier is in the view."""
        self.changes_upper = minimum(None)
        """All changes of the contents lie before this frontier, which is at most `upper`."""
        self.contents: Contents = FullView()
        self._in_use = KeysInUse()
        self._look_ups = LookUps(session.shard.stack.supervisor, self._look_up)
        self._pin: HistoryPin | None = None
        self._turn = asyncio.Lock()
        self.tidying: asyncio.Task[None] | None = None
        """Merges changes and evicts keys, if that takes several turns of the loop."""
        self._outgrown: float = inf
        """The least size of a state whose contents did not fit into memory so far."""
        self._fits_at, self._fits_again = -1, False
        """The last version whose size was looked at, and whether its contents surely fit."""
        self.version = 0
        """Rises with every change of the contents, and when a resident view ceases to be one."""
        self.foreign_changes = 0
        """Rises with every change of another process."""
        self._changed_keys = ChangedKeys()

    @property
    def is_resident(self) -> bool:
        """Whether all contents are in memory."""
        return isinstance(self.contents, FullView)

    @property
    def is_behind(self) -> bool:
        """Whether the newest state that this process knows is beyond `upper`."""
        state = self.session.shard.register.state
        return state is not None and state.upper is not self.upper and state.upper != self.upper

    async def open(self) -> None:
        """Read the contents, if the view is to be resident."""
        async with self._turn:
            await self._begin()

    async def become(self, resident: bool | None) -> None:
        """Be resident, or not, from now on; `None` changes nothing."""
        if resident is not None:
            self.resident = resident
            await self.catch_up()
            self._bound()

    async def catch_up(self) -> None:
        """Bring the view to the newest state that this process knows. Requests only for parts in blobs."""
        if not self.is_behind and not self._should_become_resident:
            return
        async with self._turn:
            while self.is_behind:
                try:
                    await self._catch_up(self.session.shard.state)
                except (LeaseExpired, SinceViolation):  # the hold was lost
                    await self._begin()
            if self._should_become_resident:
                await self._begin()

    @asynccontextmanager
    async def own_commit(
        self, lower: Antichain, upper: Antichain, changes: Mapping[str, str | None]
    ) -> AsyncIterator[Callable[[], None]]:
        """A commit of this process moved `lower` to `upper`. Yields a function that applies its changes."""
        takes_long = len(changes) > SLICE_ROWS and not self._turn.locked()
        async with self._turn if takes_long else nullcontext():  # so that nobody reads them meanwhile
            yield await self._application(lower, upper, changes)
            await self._wait_until_tidy()

    def changed_since(self, version: int) -> set[str] | None:
        """The keys that changed after that version; `None` if they are forgotten."""
        return set() if version == self.version else self._changed_keys.since(version)

    def close(self) -> None:
        """Drop the hold."""
        if self._pin is not None:
            self.session.hold.drop(self._pin)

    # --- keys ------------------------------------------------------------------------------------

    @contextmanager
    def keeping(self, keys: Collection[str]) -> Iterator[None]:
        """Within it these keys stay in memory, once they are there."""
        self.keep(keys)
        try:
            yield
        finally:
            self.release(keys)

    def keep(self, keys: Collection[str]) -> None:
        """These keys stay in memory, once they are there, until `release`."""
        self._in_use.add(keys)

    def release(self, keys: Collection[str]) -> None:
        self._in_use.remove(keys)
        self._bound()

    async def fetch(self, keys: Collection[str]) -> None:
        """Look up those of the keys, which are kept, that are not in memory."""
        while unknown := self.contents.unknown(keys):
            await self._look_ups.of(unknown)

    async def read(self, keys: Collection[str]) -> dict[str, str]:
        """The values of the keys that exist, all as of the moment of the return."""
        with self.keeping(keys):
            await self.fetch(keys)
            return {key: val for key in keys if (val := self.contents.val_of(key)) is not None}

    async def _look_up(self, keys: list[str]) -> None:
        """Look them up. The result is dropped if the view begins anew meanwhile."""
        contents, pin, shard = self.contents, self._pin, self.session.shard
        if isinstance(contents, FullView) or not (keys := contents.unknown(keys)):
            return
        self._move_base(contents)
        as_of, vals = last_before(contents.base), {}
        with self.keeping(dict.fromkeys(keys)):
            try:
                if contents.base != minimum(None):
                    assert pin is not None
                    self._check(contents.base, pin, shard.state)
                    vals = await look_up(
                        self.session, self.table_schema, shard.state, as_of, pin.reader, keys
                    )
            except (LeaseExpired, SinceViolation):
                async with self._turn:
                    if self.contents is contents:
                        await self._begin()
            else:
                for start in range(0, len(keys), SLICE_ROWS):
                    contents.cache(keys[start : start + SLICE_ROWS], vals)
                    await self.session.shard.stack.runtime.sleep(0)

    # --- its beginning ---------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Begin anew, at the newest state."""
        session = self.session
        while True:
            state = await session.shard.open()
            try:
                fits = may_fit(state, self._bytes_max) if self.resident is None else self.resident
                if fits and state.upper != minimum(None):
                    await self._begin_with_all()
                else:
                    pin = await session.need(hold_for(state.upper, None), None)
                    self._replace_contents(self._unread(), session.shard.state.upper, pin)
            except SinceViolation:
                continue
            return

    def _replace_contents(self, contents: Contents, upper: Antichain, pin: HistoryPin) -> None:
        self.close()
        self.contents, self.upper, self.changes_upper, self._pin = contents, upper, upper, pin
        self._fits_at = -1
        self._forget_changes()
        self._bound()

    def _forget_changes(self) -> None:
        self.version, self.foreign_changes = self.version + 1, self.foreign_changes + 1
        self._changed_keys.clear()

    def _unread(self) -> Contents:
        """The contents at the newest state, without a read: of a part, no key."""
        upper = self.session.shard.state.upper
        is_empty = upper == minimum(None) and self.resident is not False
        return FullView() if is_empty else PartialView(upper, self._in_use)

    async def _begin_with_all(self) -> None:
        """Read all contents, or begin with none of them if they do not fit."""
        session = self.session
        async with await session.snapshot(None, wait=False) as snapshot:
            upper = Antichain(as_int(snapshot.as_of) + 1)
            pin = await session.need(hold_for(upper, None), snapshot.as_of)
            try:
                full_view = await self._read_all(snapshot, session.shard.state)
                while full_view is not None and not self.upper <= upper:  # commits of our own came meanwhile
                    state = session.shard.state
                    updates = await session.updates_since(upper, state, pin.reader)
                    full_view.put(await self._changes(updates), upper := state.upper)
            except BaseException:
                session.hold.drop(pin)
                raise
        if full_view is None:
            self._replace_contents(self._unread(), session.shard.state.upper, pin)
        else:
            self._replace_contents(full_view, upper, pin)

    async def _read_all(self, snapshot: Snapshot[Any, Any], state: State) -> FullView | None:
        """All contents; `None` if they take too much memory."""
        stack, size = self.session.shard.stack, contents_at_most(state)
        if self.resident or size <= self._bytes_max:
            return await stack.compute(full_view_of, self.table_schema, await updates_of(snapshot))
        full_view = FullView()
        async for batch in snapshot.batches():
            await stack.compute(add_all, full_view, self.table_schema, batch)
            if full_view.bytes > self._bytes_max:
                self._outgrown = min(self._outgrown, size)
                return None
        return full_view

    # --- its bounds ------------------------------------------------------------------------------

    @property
    def _bytes_max(self) -> int:
        return self.session.shard.stack.settings.table_resident_bytes

    @property
    def _should_become_resident(self) -> bool:
        """Whether the view is not resident, but should be."""
        if self.is_resident or self.resident is not None:
            return bool(self.resident) and not self.is_resident
        state = self.session.shard.state
        if state.seqno != self._fits_at:
            self._fits_at = state.seqno
            self._fits_again = surely_fits(state, min(self._bytes_max, self._outgrown))
        return self._fits_again

    def _bound(self) -> None:
        """Keep the memory within its bound, by now or soon."""
        if isinstance(contents := self.contents, FullView):
            too_large = self.resident is None and contents.bytes > self._bytes_max
            if too_large:
                self._outgrown = min(self._outgrown, contents_at_most(self.session.shard.state))
            if self.resident is False or too_large:
                self.contents = PartialView(self.upper, self._in_use)
                self.version += 1  # so that what was read is looked up again before it is compared
            return
        self._move_base(contents)
        if self.tidying is None and not contents.tidy(self._bytes_max):
            supervisor = self.session.shard.stack.supervisor
            self.tidying = supervisor.background(self._tidy(), "tidy a view")

    async def _tidy(self) -> None:
        try:
            while isinstance(contents := self.contents, PartialView) and not contents.tidy(self._bytes_max):
                await self.session.shard.stack.runtime.sleep(0)
        finally:
            self.tidying = None

    def _move_base(self, contents: PartialView) -> None:
        base = next_base(
            self.session.shard.state, contents.base, self.upper, contents.recent_bytes, self._bytes_max
        )
        if base != contents.base:
            contents.move(base)
            self._hold()

    def _hold(self) -> None:
        """Move the hold as far forward as the view allows."""
        if self._pin is not None:
            frontier = self.upper if isinstance(self.contents, FullView) else self.contents.base
            self.session.hold.move(self._pin, hold_for(frontier, None))

    # --- catching up -----------------------------------------------------------------------------

    def _check(self, frontier: Antichain, pin: HistoryPin, state: State) -> None:
        """`LeaseExpired` or `SinceViolation` if the history from `frontier` on may be gone."""
        session = self.session
        if state.finalized:
            raise ShardFinalized("it is finalized", shard_id=session.shard.id)
        session.hold.check(pin.reader)
        if not session.hold.keeps and not state.since <= hold_for(frontier, None):
            raise SinceViolation(None, state.since, shard_id=session.shard.id)

    async def _catch_up(self, state: State) -> None:
        lower, pin = self.upper, self._pin
        assert pin is not None
        self._check(lower, pin, state)
        if not self.resident and is_too_large(
            parts_since(state, lower), self._bytes_max, resident=self.is_resident
        ):
            await self._pass_over(state)
            return
        updates = await self.session.updates_since(lower, state, pin.reader)
        changes, foreign = await self._changes(updates), updates.num_rows > 0
        (await self._application(lower, state.upper, changes, foreign=foreign))()
        await self._wait_until_tidy()

    async def _changes(self, updates: pa.Table) -> dict[str, str | None]:
        """The new values of the changed keys, without keys whose value is the old one again."""
        compute, changes = self.session.shard.stack.compute_rows, self.table_schema.changes
        return await compute(updates, changes, updates) if updates.num_rows else {}

    async def _pass_over(self, state: State) -> None:
        """Begin anew behind updates that are too large to read."""
        if self.is_resident:  # perhaps a compaction merged them with older updates
            await self._begin()
            return
        self.upper = self.changes_upper = state.upper
        self.contents = PartialView(state.upper, self._in_use)
        self._forget_changes()
        self._hold()

    async def _application(
        self, lower: Antichain, upper: Antichain, changes: Mapping[str, str | None], *, foreign: bool = False
    ) -> Callable[[], None]:
        """A function that applies the changes between `lower` and `upper` in one turn of the loop, unless the
        view has them by then. Many changes are put into a copy on a thread, or merged later."""
        contents, after = self.contents, None
        if len(changes) > SLICE_ROWS and isinstance(contents, FullView) and self.upper == lower:
            after = await self.session.shard.stack.compute(contents.with_changes, changes)

        def apply() -> None:
            is_current = self.contents is contents
            self.apply(lower, upper, changes, after if is_current else None, foreign=foreign)

        return apply

    def apply(
        self,
        lower: Antichain,
        upper: Antichain,
        changes: Mapping[str, str | None],
        after: FullView | None = None,
        *,
        foreign: bool = False,
    ) -> None:
        """Apply these changes, unless the view has them. `after`: the contents with them, if a thread made
        them. `foreign`: another process made the changes."""
        if self.upper is not lower and self.upper != lower:
            return
        if after is not None:
            self.contents = after
        else:
            self.contents.put(changes, upper)
        self.foreign_changes += foreign
        if changes:
            self.version += 1
            self._changed_keys.add(self.version, changes)
        if changes or foreign:  # a value may have changed and changed back
            self.changes_upper = upper
        self.upper = upper
        self._hold()
        self._bound()

    async def _wait_until_tidy(self) -> None:
        """Wait until changes are merged, so that the next ones take no longer."""
        if self.tidying is not None:
            await asyncio.wait([self.tidying])
