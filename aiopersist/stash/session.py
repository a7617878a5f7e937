"""The work of a stash on its store: reads that know whether they were fenced, and the one loop that writes.

1. One change at a time. First settle an earlier change that is in doubt, or still under way (its caller
   was cancelled).
2. Plan: a pure function of the collections as they were last seen gives the change, or refuses. A refusal
   counts only after a fresh look; a plan made of old collections fails by their revisions.
3. Commit, in one transaction with the fence and with this opener's token: it expects the last token and
   leaves a fresh one. So of two sendings of one change at most one happens, also a late one.
4. After a lost answer, the opener's row says whether it has our token. Reading the row waits for a
   transaction in progress. If the row still has the last token, the same change is sent again. If the first
   sending is still on its way, the second of the two to arrive finds its own token there: applied.

A commit runs in a task of the supervisor. A caller that is cancelled stops waiting; the change may happen.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from aiopersist.base.ending import spawn_with_result
from aiopersist.base.errors import Corruption, Indeterminate, StorageUnavailable
from aiopersist.base.failures import Backoff
from aiopersist.base.runtime import Runtime
from aiopersist.base.settings import Settings
from aiopersist.base.supervisor import RELEASE_DEADLINE_S, Supervisor
from aiopersist.measure.metrics import Metrics, NoMetrics
from aiopersist.stash.errors import Fenced, StashError
from aiopersist.stash.memory import DraftStore, moved
from aiopersist.stash.model import Loaded, Opener, Select, Sending, StoreChange, Stored, StoredRows, Verdict
from aiopersist.stash.store import Store
from aiopersist.storage.layers import Retry
from aiopersist.storage.stall import StallLog
from aiopersist.storage.wishes import Losses, slot_after

Plan = Callable[[Mapping[int, Stored]], StoreChange]
"""From collections as they are now, without rows, to a change."""

CONSOLIDATE_ROWS_MIN = 256  # added rows: fewer are summed faster by every reader than by a transaction


class StashSession:
    """The session of one opener with one store. `opener` is `None` for a session that only reads."""

    def __init__(
        self,
        store: Store,
        opener: Opener | None,
        token: str,
        *,
        settings: Settings,
        runtime: Runtime,
        supervisor: Supervisor,
    ) -> None:
        self.store = store
        self.metrics: Metrics = NoMetrics()
        """Where its changes are counted; set by the client that opens it."""
        self.opener = opener
        self.runtime = runtime
        self.supervisor = supervisor
        self._token = token
        self._doubtful: set[str] = set()
        """Tokens of changes with an unknown outcome: one of them may have happened, or may still happen, if
        it comes before the next change."""
        self._retry = Retry(settings.retry_timeout_s, runtime)
        self._settings = settings
        self._turn = asyncio.Lock()
        self._losses: defaultdict[frozenset[int], Losses] = defaultdict(Losses)
        """By the collections of a change: an opener that wins elsewhere may still lose here."""
        self._under_way: asyncio.Task[Verdict] | None = None
        self._last_seen: dict[int, Stored] = {}
        """Collections as they were last seen, without rows: only a hint."""
        self._consolidating: set[int] = set()
        self._failing = Backoff(supervisor.failures, "a consolidation of a stash, which is repeated,")

    # --- reading ---------------------------------------------------------------------------------

    async def load(self, select: Select) -> Loaded:
        """The selected collections, at one moment; `Fenced` if another opener has taken over. One request."""
        loaded = await self._retry.repeat("stash.load", lambda: self.store.load(select))
        if loaded is None:
            raise StashError("the stash is gone")
        if self.opener is not None and loaded.fence != self.opener.fence:
            raise fenced(self.opener, loaded.fence.epoch)
        for stored in loaded.collections:
            self._see(stored)
        return loaded

    # --- writing ---------------------------------------------------------------------------------

    async def change(self, ids: Sequence[int], plan: Plan) -> None:
        """Make the change that `plan` gives for the collections of these ids. One request, if they are as
        they were last seen."""
        opener, began, fresh = self.writing(), self.metrics.now(), False
        async with self._turn:
            await self._quiet()
            while True:
                fresh = await self.yield_to_others(ids) or fresh
                change = await self._planned(ids, plan, fresh)
                if await self._apply(opener, change, began):
                    return
                fresh = True

    async def _planned(self, ids: Sequence[int], plan: Plan, fresh: bool) -> StoreChange:
        """The change for the collections as they are, or, unless `fresh`, as they were last seen, if that is
        possible."""
        seen = {cid: self._last_seen[cid] for cid in ids if cid in self._last_seen}
        if not fresh and len(seen) == len(set(ids)):
            with suppress(StashError):
                return plan(seen)
        loaded = await self.load(Select(tuple(ids), rows=False))
        return plan({stored.id: stored for stored in loaded.collections})

    async def yield_to_others(self, ids: Iterable[int]) -> bool:
        """Before a change of these collections, wait for openers that wish to go first; returns whether it
        waited. No request."""
        losses, others = self._losses[frozenset(ids)], partial(self.store.stand_back_s, self.writing().id)
        wait_s = losses.wait_s(others, self.runtime.monotonic())
        if wait_s:
            await self.runtime.sleep(wait_s)
            losses.waited(wait_s)
        return bool(wait_s)

    async def attempt(self, change: StoreChange) -> bool:
        """Make the change; `False` if something is not as the change expects."""
        opener, began = self.writing(), self.metrics.now()
        async with self._turn:
            await self._quiet()
            return await self._apply(opener, change, began)

    async def consolidate(self, cid: int) -> None:
        """Sum the rows that can be summed. One transaction."""
        opener = self.writing()
        remaining = await self._retry.repeat("stash.consolidate", lambda: self.store.consolidate(opener, cid))
        if remaining is None:
            raise fenced(opener)
        if (seen := self._last_seen.get(cid)) is not None:
            self._last_seen[cid] = replace(seen, added=0, summed=remaining)

    @property
    def can_be_fenced(self) -> bool:
        return self.opener is not None and not isinstance(self.store, DraftStore)

    def writing(self) -> Opener:
        """The opener that writes; `StashError` if the stash was opened read-only."""
        if self.opener is None:
            raise StashError("the stash was opened read-only")
        return self.opener

    def draft(self, store: DraftStore, loaded: Loaded) -> "StashSession":
        """A session on a copy, so that no other opener sees its changes."""
        return StashSession(
            store,
            Opener("", loaded.fence),
            "",
            settings=self._settings,
            runtime=self.runtime,
            supervisor=self.supervisor,
        )

    async def aclose(self) -> None:
        """Wait for a change under way, then remove the opener's row, unless a change is in doubt."""
        with suppress(StorageUnavailable, Indeterminate, TimeoutError):  # a later opener does it
            async with asyncio.timeout(RELEASE_DEADLINE_S):
                await self._quiet()
                if self.opener is not None and not self._doubtful:
                    await self.store.forget(self.opener.id)

    # --- inside ----------------------------------------------------------------------------------

    async def _quiet(self) -> None:
        """Wait for a change whose caller was cancelled."""
        if self._under_way is not None and not self._under_way.done():
            await asyncio.wait([self._under_way])

    async def _apply(self, opener: Opener, change: StoreChange, began: float) -> bool:
        spawn = partial(self.supervisor.spawn, name="change a stash", eager=True)
        task, answer = spawn_with_result(partial(self._commit, opener, change, began), spawn)
        self._under_way = task
        task.add_done_callback(self._done)
        verdict = await answer  # a cancellation ends this wait, not the change
        if verdict is Verdict.FENCED:
            raise fenced(opener)
        losses = self._losses[frozenset(change.expected)]
        if verdict is Verdict.APPLIED:
            losses.in_a_row = 0
            return True
        await self._lost(opener, losses)
        return False

    async def _lost(self, opener: Opener, losses: Losses) -> None:
        """Another opener was first. If that happens again and again, ask the others to stand back."""
        now = self.runtime.monotonic()
        losses.lost(losses.planned + 1, now)
        if slot_s := losses.slot_s:
            waited_s = losses.waited_s(now)
            ahead_s = self.store.stand_back_s(opener.id, waited_s)
            for_s = slot_after(ahead_s, slot_s)
            losses.wished(now, waited_s, ahead_s, for_s)
            with suppress(Exception):  # it decides nothing
                await self.store.wish(opener.id, for_s, waited_s)

    def _done(self, task: asyncio.Task[Verdict]) -> None:
        if self._under_way is task:
            self._under_way = None

    async def _commit(self, opener: Opener, change: StoreChange, began: float) -> Verdict:
        """Send the change until its outcome is known."""
        token, delays, lost_at = self.runtime.token(), self.runtime.delays(), None
        stall = StallLog(lambda: "the outcome of a change of a stash", self.runtime)
        sent = False  # whether a sending may have happened, or may still
        try:
            while True:
                lost = None
                try:
                    verdict = await self._send(opener, change, token)
                except Indeterminate as error:
                    sent, lost, verdict = True, error, Verdict.FORGOTTEN
                    lost_at = lost_at or self.runtime.monotonic()
                doubtful = verdict is Verdict.FORGOTTEN or (sent and verdict is not Verdict.APPLIED)
                if doubtful and await self._landed(opener, token, sent):
                    verdict = Verdict.APPLIED
                if verdict is not Verdict.FORGOTTEN:
                    break
                if lost is not None:
                    self._check_patience(lost, lost_at)
                    stall.note(lost)
                    await self.runtime.sleep(next(delays))
        except BaseException as error:
            if isinstance(error, StorageUnavailable) and not sent:
                raise
            self._doubtful.add(token)
            self._last_seen.clear()
            if isinstance(error, StorageUnavailable):
                raise Indeterminate(f"a change of the stash may have happened: {error}") from error
            raise
        if verdict is Verdict.APPLIED:
            self.metrics.stash_changed(began)
            self._token = token
            self._doubtful.clear()  # they expect a token that is gone
            self._applied(change)
        return verdict

    async def _send(self, opener: Opener, change: StoreChange, token: str) -> Verdict:
        sending = Sending(self._token, token)
        return await self._retry.repeat(
            "stash.commit", lambda: self.store.commit(opener, change, sending), idempotent=False
        )

    async def _landed(self, opener: Opener, token: str, sent: bool) -> bool:
        """Whether the opener's row says that the sending with `token` happened; if not, the change can be
        sent again. `Indeterminate` if the row cannot tell."""
        current = await self._retry.repeat("stash.token", lambda: self.store.token(opener.id))
        if current == token:
            return True
        if current == self._token:
            return False
        if current in self._doubtful:  # that change has happened after all
            self._token = current
            return False
        if current is not None:
            text = "this opener wrote to another stash than this one: was it restored from a backup?"
            raise Corruption(text)
        fresh = self.runtime.token()
        self._doubtful.add(fresh)  # if its answer is lost, too
        await self._retry.repeat("stash.enroll", lambda: self.store.enroll(opener.id, fresh))
        self._token = fresh
        if sent:
            text = "the opener's row was gone, so the change of the stash may have happened: read the stash"
            raise Indeterminate(text)
        return False

    def _check_patience(self, lost: Indeterminate, since: float | None) -> None:
        """Raise `lost` if answers have been lost for longer than `retry_timeout_s`."""
        limit = self._settings.retry_timeout_s
        if limit is not None and since is not None and self.runtime.monotonic() - since > limit:
            raise lost

    def _see(self, stored: Stored) -> None:
        seen = self._last_seen.get(stored.id)
        if seen is None or seen.revision <= stored.revision:
            self._last_seen[stored.id] = replace(stored, rows=StoredRows())

    def _applied(self, change: StoreChange) -> None:
        for cid, move in change.moves.items():
            seen = self._last_seen.get(cid)
            if seen is not None and seen.revision == change.expected[cid]:
                stored = moved(seen, move)
                self._see(stored)
                self._consolidate_later(stored)
        for created in change.created:
            self._see(created)

    def _consolidate_later(self, stored: Stored) -> None:
        if stored.added < max(CONSOLIDATE_ROWS_MIN, stored.summed) or stored.id in self._consolidating:
            return
        self._consolidating.add(stored.id)
        self.supervisor.background(self._consolidate_quietly(stored.id), f"consolidate {stored.name}")

    async def _consolidate_quietly(self, cid: int) -> None:
        try:
            await self.consolidate(cid)
            self._failing.succeeded()
        except Fenced:  # the next owner consolidates
            pass
        except Exception as error:  # during its pause no change begins another consolidation
            await self._failing.failed(error)
        finally:
            self._consolidating.discard(cid)


def fenced(opener: Opener, epoch: int | None = None) -> Fenced:
    """The error of an opener that was fenced."""
    now = "" if epoch is None else f" at epoch {epoch}"
    return Fenced(f"another opener took the stash over{now}; ours was {opener.fence.epoch}: stop this one")
