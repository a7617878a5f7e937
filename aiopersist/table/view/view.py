"""The contents of a table by key, as of the newest upper that this process knows.

The view stands at a frontier, its upper, which never goes back. To *catch up* with a newer state it fetches
the updates since then, as a listen does. It applies own commits without reading them.

A *resident* view has all contents in memory, below `settings.table_resident_bytes`. Any other view has a part
of them (`contents.py`) and looks up other keys in the shard as of its base (`lookup.py`), for which it holds
since back.

- A caller that needs keys *keeps* them, and has the unknown ones looked up. A kept key stays known, unless
  the view begins anew: then it is unknown, and the caller notices before it goes on.
- A look-up awaits. Its answer counts for keys that are still unknown, if the view has not begun anew: a key
  that changed meanwhile is known by that change.
- The base moves forward to save memory, and when a compaction has merged recent parts with older ones, so
  that a look-up reads few parts. Answers do not depend on the base.
- The view does not read new batches that are too large: it begins anew behind them, and knows nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
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
from aiopersist.table.view import contents
from aiopersist.table.view.contents import ChangedKeys, FullView, Held, Kept, PartialView
from aiopersist.table.view.lookup import LookUps, add_all, look_up, whole_of


class View:
    """See the header. `wanted`: whether it is resident; `None`: its size decides."""

    def __init__(
        self, kind: TableSchema[Any, Any], session: ReadSession[Any, Any], wanted: bool | None
    ) -> None:
        self.kind = kind
        self.session = session
        self.wanted = wanted
        self.upper = minimum(None)
        """Everything before this frontier is in the view."""
        self.changed = minimum(None)
        """All its changes lie before this frontier, which is not beyond `upper`."""
        self.held: Held = FullView()
        self._kept = Kept()
        self._look_ups = LookUps(session.shard.stack.supervisor, self._look_up)
        self._need: HistoryPin | None = None
        self._turn = asyncio.Lock()
        self.settling: asyncio.Task[None] | None = None
        """Puts in order what it holds, where that takes several turns of the loop."""
        self._outgrown: float = inf
        """The least size of a state whose contents did not fit, as far as is known."""
        self._judged, self._fits_again = -1, False
        """The version that was judged last, and whether its contents surely fit."""
        self.version = 0
        """Rises with every change of the contents, and once these are no longer all in memory."""
        self.foreign = 0
        """Rises with every change of another process that it takes."""
        self._changed = ChangedKeys()

    @property
    def is_resident(self) -> bool:
        """Whether all contents are in memory."""
        return isinstance(self.held, FullView)

    @property
    def is_behind(self) -> bool:
        """Whether the newest state that this process knows has more."""
        state = self.session.shard.register.state
        return state is not None and state.upper is not self.upper and state.upper != self.upper

    async def open(self) -> None:
        """Read the contents, if they are to be resident."""
        async with self._turn:
            await self._begin()

    async def become(self, wanted: bool | None) -> None:
        """Be resident, or not, from now on; `None`: as before."""
        if wanted is not None:
            self.wanted = wanted
            await self.catch_up()
            self._bound()

    async def catch_up(self) -> None:
        """Bring the view to the newest state that this process knows. Requests only for parts in blobs."""
        if not self.is_behind and not self._should_return:
            return
        async with self._turn:
            while self.is_behind:
                try:
                    await self._catch_up(self.session.shard.state)
                except (LeaseExpired, SinceViolation):  # nothing held its history
                    await self._begin()
            if self._should_return:
                await self._begin()

    @asynccontextmanager
    async def committed(
        self, lower: Antichain, upper: Antichain, changes: Mapping[str, str | None]
    ) -> AsyncIterator[Callable[[], None]]:
        """A commit of this process replaced `lower` by `upper`, with these changes: gives what takes them."""
        takes_long = len(changes) > SLICE_ROWS and not self._turn.locked()
        async with self._turn if takes_long else nullcontext():  # nobody need read them meanwhile
            yield await self._taking(lower, upper, changes)
            await self._settled()

    def changed_since(self, version: int) -> set[str] | None:
        """The keys that changed after that version; `None` if this is not remembered."""
        return set() if version == self.version else self._changed.since(version)

    def close(self) -> None:
        """Hold nothing any more."""
        if self._need is not None:
            self.session.hold.drop(self._need)

    # --- keys ------------------------------------------------------------------------------------

    def unknown(self, keys: Iterable[str]) -> list[str]:
        """Those keys whose values are not in memory."""
        return self.held.unknown(keys)

    def val_of(self, key: str) -> str | None:
        """The value of a key that is not unknown."""
        return self.held.val_of(key)

    @contextmanager
    def keeping(self, keys: Collection[str]) -> Iterator[None]:
        """Within it these keys stay known, once they are."""
        self.keep(keys)
        try:
            yield
        finally:
            self.release(keys)

    def keep(self, keys: Collection[str]) -> None:
        """These keys stay known, once they are, until `release`."""
        self._kept.add(keys)

    def release(self, keys: Collection[str]) -> None:
        """The opposite of `keep`."""
        self._kept.remove(keys)
        self._bound()

    async def know(self, keys: Collection[str]) -> None:
        """Look up the unknown ones of keys that are kept."""
        while unknown := self.unknown(keys):
            await self._look_ups.of(unknown)

    async def read(self, keys: Collection[str]) -> dict[str, str]:
        """The values of those of `keys` that are there, all of the moment of the return."""
        with self.keeping(keys):
            await self.know(keys)
            return {key: val for key in keys if (val := self.val_of(key)) is not None}

    async def _look_up(self, keys: list[str]) -> None:
        """Look them up; when the view began anew meanwhile, in vain."""
        held, need, shard = self.held, self._need, self.session.shard
        if isinstance(held, FullView) or not (keys := held.unknown(keys)):
            return
        self._move_base(held)
        as_of, vals = last_before(held.base), {}
        with self.keeping(dict.fromkeys(keys)):
            try:
                if held.base != minimum(None):
                    assert need is not None
                    self._check(held.base, need, shard.state)
                    given = self.session, self.kind, shard.state, as_of, need.reader
                    vals = await look_up(*given, keys)
            except (LeaseExpired, SinceViolation):
                await self._begin_instead_of(held)
            else:
                for start in range(0, len(keys), SLICE_ROWS):
                    held.found(keys[start : start + SLICE_ROWS], vals)
                    await self.session.shard.stack.runtime.sleep(0)

    async def _begin_instead_of(self, held: Held) -> None:
        async with self._turn:
            if self.held is held:
                await self._begin()

    # --- its beginning ---------------------------------------------------------------------------

    async def _begin(self) -> None:
        """Begin anew, at the newest state."""
        session = self.session
        while True:
            state = await session.shard.open()
            try:
                if state.upper != minimum(None) and self._may_fit(state):
                    await self._load()
                else:
                    need = await session.need(hold_for(state.upper, None), None)
                    self._begin_with(self._nothing(), session.shard.state.upper, need)
            except SinceViolation:
                continue
            return

    def _begin_with(self, held: Held, upper: Antichain, need: HistoryPin) -> None:
        self.close()
        self.held, self.upper, self.changed, self._need = held, upper, upper, need
        self._judged = -1
        self._forget_changes()
        self._bound()

    def _forget_changes(self) -> None:
        self.version, self.foreign = self.version + 1, self.foreign + 1
        self._changed.clear()

    def _nothing(self) -> Held:
        """What it has at the newest state without reading anything."""
        upper = self.session.shard.state.upper
        is_empty = upper == minimum(None) and self.wanted is not False
        return FullView() if is_empty else PartialView(upper, self._kept)

    async def _load(self) -> None:
        """Read all contents, or as far as they fit."""
        session = self.session
        async with await session.snapshot(None, wait=False) as snapshot:
            upper = Antichain(as_int(snapshot.as_of) + 1)
            need = await session.need(hold_for(upper, None), snapshot.as_of)
            try:
                whole = await self._whole(snapshot, session.shard.state)
                while whole is not None and not self.upper <= upper:  # commits of our own came meanwhile
                    state = session.shard.state
                    updates = await session.updates_since(upper, state, need.reader)
                    whole.put(await self._changes(updates), upper := state.upper)
            except BaseException:
                session.hold.drop(need)
                raise
        if whole is None:
            self._begin_with(self._nothing(), session.shard.state.upper, need)
        else:
            self._begin_with(whole, upper, need)

    async def _whole(self, snapshot: Snapshot[Any, Any], state: State) -> FullView | None:
        """All contents; `None` if they are more than they may be."""
        stack, size = self.session.shard.stack, contents.contents_at_most(state)
        if self.wanted or size <= self._bytes_max:
            return await stack.compute(whole_of, self.kind, await updates_of(snapshot))
        whole = FullView()
        async for batch in snapshot.batches():
            await stack.compute(add_all, whole, self.kind, batch)
            if whole.bytes > self._bytes_max:
                self._outgrown = min(self._outgrown, size)
                return None
        return whole

    # --- its bounds ------------------------------------------------------------------------------

    @property
    def _bytes_max(self) -> int:
        return self.session.shard.stack.settings.table_resident_bytes

    def _may_fit(self, state: State) -> bool:
        """Whether the contents of a state may be resident."""
        return contents.may_fit(state, self._bytes_max) if self.wanted is None else self.wanted

    @property
    def _should_return(self) -> bool:
        """Whether to become resident."""
        if self.is_resident or self.wanted is not None:
            return bool(self.wanted) and not self.is_resident
        state = self.session.shard.state
        if state.seqno != self._judged:
            self._judged = state.seqno
            self._fits_again = contents.surely_fits(state, min(self._bytes_max, self._outgrown))
        return self._fits_again

    def _bound(self) -> None:
        """Keep to the memory that it may take, by now or soon."""
        if isinstance(held := self.held, FullView):
            too_large = self.wanted is None and held.bytes > self._bytes_max
            if too_large:
                self._outgrown = min(self._outgrown, contents.contents_at_most(self.session.shard.state))
            if self.wanted is False or too_large:
                self.held = PartialView(self.upper, self._kept)
                self.version += 1  # so that what was read is looked up again before it is compared
            return
        self._move_base(held)
        if self.settling is None and not held.settle(self._bytes_max):
            supervisor = self.session.shard.stack.supervisor
            self.settling = supervisor.background(self._settle(), "settle a view")

    async def _settle(self) -> None:
        try:
            while isinstance(held := self.held, PartialView) and not held.settle(self._bytes_max):
                await self.session.shard.stack.runtime.sleep(0)
        finally:
            self.settling = None

    def _move_base(self, held: PartialView) -> None:
        base = contents.next_base(
            self.session.shard.state, held.base, self.upper, held.recent_bytes, self._bytes_max
        )
        if base != held.base:
            held.move(base)
            self._hold()

    def _hold(self) -> None:
        """Hold since back no further than is needed."""
        if self._need is not None:
            frontier = self.upper if isinstance(self.held, FullView) else self.held.base
            self.session.hold.move(self._need, hold_for(frontier, None))

    # --- catching up -----------------------------------------------------------------------------

    def _check(self, frontier: Antichain, need: HistoryPin, state: State) -> None:
        """`LeaseExpired` or `SinceViolation` unless the history from there on is there."""
        session = self.session
        if state.finalized:
            raise ShardFinalized("it is finalized", shard_id=session.shard.id)
        session.hold.check(need.reader)
        if not session.hold.keeps and not state.since <= hold_for(frontier, None):
            raise SinceViolation(None, state.since, shard_id=session.shard.id)

    async def _catch_up(self, state: State) -> None:
        lower, need = self.upper, self._need
        assert need is not None
        self._check(lower, need, state)
        if not self.wanted and contents.is_too_large(
            parts_since(state, lower), self._bytes_max, resident=self.is_resident
        ):
            await self._pass_over(state)
            return
        updates = await self.session.updates_since(lower, state, need.reader)
        taking = self._taking(lower, state.upper, await self._changes(updates), foreign=updates.num_rows > 0)
        (await taking)()
        await self._settled()

    async def _changes(self, updates: pa.Table) -> dict[str, str | None]:
        """The new values of the keys that they change; a key that has its value again is not among them."""
        stack = self.session.shard.stack
        return await stack.compute_rows(updates, self.kind.changes, updates) if updates.num_rows else {}

    async def _pass_over(self, state: State) -> None:
        """Begin anew behind what is too large to be read."""
        if self.is_resident:  # perhaps a compaction put it together with what was read before
            await self._begin()
            return
        self.held, self.upper, self.changed = PartialView(state.upper, self._kept), state.upper, state.upper
        self._forget_changes()
        self._hold()

    async def _taking(
        self, lower: Antichain, upper: Antichain, changes: Mapping[str, str | None], *, foreign: bool = False
    ) -> Callable[[], None]:
        """What takes the changes between `lower` and `upper`, all in one turn of the loop, unless it has them
        by then. Many are put into a copy, on a thread, or beside the others until they are merged."""
        held, after = self.held, None
        if len(changes) > SLICE_ROWS and isinstance(held, FullView) and self.upper == lower:
            after = await self.session.shard.stack.compute(held.with_changes, changes)

        def take() -> None:
            put_in = after is not None and self.held is held
            self.take(lower, upper, changes, after if put_in else None, foreign=foreign)

        return take

    def take(
        self,
        lower: Antichain,
        upper: Antichain,
        changes: Mapping[str, str | None],
        after: FullView | None = None,
        *,
        foreign: bool = False,
    ) -> None:
        """Take these, unless it has them. `after`: what it holds then. `foreign`: they are of others."""
        if self.upper is not lower and self.upper != lower:
            return
        if after is not None:
            self.held = after
        else:
            self.held.put(changes, upper)
        self.foreign += foreign
        if changes:
            self.version += 1
            self._changed.add(self.version, changes)
        if changes or foreign:  # what others changed may be as it was again, and was not in between
            self.changed = upper
        self.upper = upper
        self._hold()
        self._bound()

    async def _settled(self) -> None:
        """So that the next changes find it settled."""
        if self.settling is not None:
            await asyncio.wait([self.settling])
