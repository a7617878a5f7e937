"""One follower for all shards of a client that have waiters. Its cost does not grow with their number.

One `Watch` watches all shards that are *followed*. The follower looks at the state of a shard

- when a hint comes: at once, or as soon as there is a waiter. A single shard is looked at by a read of its
  head, several shards by one request;
- when no hint has come for `watch_timeout_s`, since hints may be lost: many shards by one request.

The watch of a shard is renewed before each look, so no version is missed. A hint that comes during a look at
its shard is kept until after the look; other shards do not wait for it.

**Vain hints** bring no new version: a store's `watch` may return or fail at once, or give hints of all keys
to all waiters. After `VAIN_MAX` vain hints in a row the next look waits `VAIN_S`, for all these shards
together, until a look brings news. A failed look ends in an error for the waiters, and the next look waits
longer each time. So the follower never spins, whatever a store does.
"""

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterator, Set
from functools import partial
from math import inf
from typing import Any, Protocol

from aiopersist.base.resource import run_bounded
from aiopersist.base.supervisor import Supervisor
from aiopersist.shard.polling import Polling
from aiopersist.storage.consensus import Consensus, Versioned
from aiopersist.storage.layers import classified
from aiopersist.storage.watch import Watch

LINGER_S = 1.0  # seconds that a shard is followed after its last waiter was served
VAIN_MAX = 8
VAIN_S = 0.5
ROUND_MIN_S = 0.01
ROUND_MAX_S = 1.0  # so that a shard without waiters is soon forgotten
NEWS_AT_ONCE = 8  # shards whose new versions are read at the same time
GATHER = 0.5  # of the time between looks: a shard due so soon is looked at with those due now


class Followed(Protocol):
    """The state of a followed shard: a `Register`."""

    key: str
    state: Any
    """The newest known state; `None` for none."""

    @property
    def seqno(self) -> int | None:
        """The version of the newest known state."""

    @property
    def has_waiters(self) -> bool:
        """Whether there are waiters for news."""

    def label(self) -> str:
        """Its name in logs."""

    async def refresh(self) -> object:
        """Look at this shard alone."""

    async def offer(self, sent: Any, head: Versioned | None) -> None:
        """Take `head`, from a look at several shards. It is not the version of `sent`, the state before."""

    def fail(self, error: Exception) -> None:
        """Raise `error` in the waiters: a look failed."""


class _Awaited:
    """A shard that is followed."""

    def __init__(self, followed: Followed, delays: Iterator[float], now: float) -> None:
        self.followed = followed
        self.delays = delays  # of looks that fail
        self.due_at = now
        self.not_before = now
        self.wanted_at = now
        self.seen = followed.seqno
        self.is_looking = False
        self.is_hinted = False  # since the last look began
        self.in_vain = 0

    @property
    def ready_at(self) -> float:
        """The moment of the next look, unless a hint comes."""
        return max(self.due_at, self.not_before)

    @property
    def may_look_at(self) -> float:
        """The moment from which a look at others may include it."""
        return self.not_before - (GATHER * VAIN_S if self.in_vain >= VAIN_MAX else 0)


class Follower:
    """See the header."""

    def __init__(self, consensus: Consensus, watch_timeout_s: float, supervisor: Supervisor) -> None:
        self._consensus = consensus
        self._timeout_s = watch_timeout_s
        self._supervisor = supervisor
        self._runtime = supervisor.failures.runtime
        self._entries: dict[Followed, _Awaited] = {}
        self._by_key: defaultdict[str, set[_Awaited]] = defaultdict(set)
        self._asked: list[_Awaited] = []
        self._watch: Watch | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.polling: Polling[Followed] = Polling(self.look, supervisor)
        """Frequent looks at the shards of consumers."""

    def follow(self, followed: Followed) -> None:
        """Follow a shard that has a waiter now. It is looked at soon, unless it was followed before."""
        self._begin()
        if followed not in self._entries:
            now = self._runtime.monotonic()
            entry = self._entries[followed] = _Awaited(followed, self._runtime.delays(), now)
            self._by_key[followed.key].add(entry)
            self._ask(entry)
        elif self._entries[followed].is_hinted:
            self._ask(self._entries[followed])

    def expect(self, followed: Followed, seqno: int) -> None:
        """A commit of this client to that version is under way. If it wins, its own hint is left out, and
        causes no look. If it does not win, the caller must call `unmet`."""
        if self._watch is not None and len(self._by_key.get(followed.key, ())) == 1:
            self._watch.expect(followed.key, seqno)

    def unmet(self, followed: Followed) -> None:
        """The expected commit did not win, or its outcome is unknown: its hint counts, and a look follows."""
        self.expect(followed, -1)
        self._hinted({followed.key})

    async def look(self, several: Collection[Followed]) -> dict[str, Exception]:
        """Bring the states up to date, by one request and the new versions; returns the errors by key."""
        seqnos = {followed.key: followed.seqno for followed in several}
        sent = {followed.key: followed.state for followed in several}
        errors: dict[str, Exception] = {}
        try:
            heads = await self._consensus.heads(seqnos) if seqnos else {}
        except Exception as error:
            return dict.fromkeys(seqnos, error)

        async def take(followed: Followed) -> None:
            try:
                if sent[followed.key] is None:
                    await followed.refresh()
                else:
                    await followed.offer(sent[followed.key], heads[followed.key])
            except Exception as error:
                errors[followed.key] = error
            await self._runtime.sleep(0)  # other tasks get a turn: there may be thousands of shards

        moved = [followed for followed in several if followed.key in heads]
        await run_bounded(NEWS_AT_ONCE, [partial(take, followed) for followed in moved])
        return errors

    # --- tasks -----------------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._watch is not None and not any(task.done() for task in self._tasks):
            return
        for task in self._tasks:
            task.cancel()
        watch = self._watch = self._consensus.watch_together()
        self._tasks = [
            self._supervisor.background(self._hear(watch), "hear of shards that are followed"),
            self._supervisor.background(self._rounds(), "look at shards that are followed"),
        ]
        for entry in self._entries.values():
            self._ask(entry)

    async def _hear(self, watch: Watch) -> None:
        delays = self._runtime.delays()
        try:
            while True:
                try:
                    keys = await watch.moved()
                except Exception as error:  # without hints, later looks find the shards that moved
                    self._supervisor.failures.report("waiting for hints", classified("watch", error))
                    await self._runtime.sleep(next(delays))
                    continue
                delays = self._runtime.delays()
                self._hinted(keys)  # no variable, which would keep the last shard alive during the wait
        finally:
            if self._watch is watch:  # a look that ends now adds nothing
                self._watch = None
            await watch.aclose()

    def _hinted(self, keys: Set[str]) -> None:
        for key in sorted(keys & self._by_key.keys()):  # one order in all runs
            for entry in self._by_key[key]:
                entry.is_hinted = True
                if entry.followed.has_waiters:
                    self._ask(entry)

    async def _rounds(self) -> None:
        while self._entries:
            await self._runtime.sleep(self._pause_s())
            self._forget_unwanted()
            self._look_at(self._due())
        hearing, *_ = self._tasks
        self._watch, self._tasks = None, []
        hearing.cancel()

    def _pause_s(self) -> float:
        waiting = (entry.ready_at for entry in self._entries.values() if not entry.is_looking)
        return min(max(min(waiting, default=inf) - self._runtime.monotonic(), ROUND_MIN_S), ROUND_MAX_S)

    def _due(self) -> list[_Awaited]:
        """The shards that are due, and if there are any, those that are due soon: one request serves all."""
        now = self._runtime.monotonic()
        waiting = [entry for entry in self._entries.values() if not entry.is_looking]
        if not any(entry.ready_at <= now for entry in waiting):
            return []
        soon = now + GATHER * self._timeout_s
        return [entry for entry in waiting if entry.due_at <= soon and entry.may_look_at <= now]

    def _forget_unwanted(self) -> None:
        now, watch = self._runtime.monotonic(), self._watch
        for followed, entry in list(self._entries.items()):
            if followed.has_waiters:
                entry.wanted_at = now
            elif now - entry.wanted_at > LINGER_S and not entry.is_looking:
                del self._entries[followed]
                self._by_key[followed.key].discard(entry)
                if not self._by_key[followed.key]:
                    del self._by_key[followed.key]
                    if watch is not None:
                        watch.discard(followed.key)

    # --- looks -----------------------------------------------------------------------------------

    def _ask(self, entry: _Awaited) -> None:
        """Look at this shard together with all others of this turn of the loop; later, if it must wait."""
        if entry.is_looking:  # `_looked` asks again
            return
        if self._runtime.monotonic() < entry.not_before:
            entry.due_at = min(entry.due_at, entry.not_before)
            return
        if not self._asked:
            asyncio.get_running_loop().call_soon(self._look_at_asked)
        self._asked.append(entry)

    def _look_at_asked(self) -> None:
        asked, self._asked = self._asked, []
        self._look_at([entry for entry in dict.fromkeys(asked) if not entry.is_looking])

    def _look_at(self, entries: list[_Awaited]) -> None:
        watch = self._watch
        if not entries or watch is None:
            return
        together = list({entry.followed.key: entry for entry in entries}.values())
        hinted = [entry for entry in together if entry.is_hinted]
        for entry in together:
            entry.is_looking, entry.is_hinted = True, False
            watch.add(entry.followed.key)
        self._supervisor.spawn(self._look(together, hinted), "look at shards", abandon=True)
        self._look_at([entry for entry in entries if not entry.is_looking])  # others of the same keys

    async def _look(self, entries: list[_Awaited], hinted: list[_Awaited]) -> None:
        errors: dict[str, Exception] = {}
        try:
            if len(entries) > 1:
                errors = await self.look([entry.followed for entry in entries])
            else:
                await entries[0].followed.refresh()
        except Exception as error:  # any error: the waiters must hear of it
            errors = dict.fromkeys([entry.followed.key for entry in entries], error)
        finally:
            for entry in hinted:
                entry.in_vain += 1
            for entry in entries:
                self._looked(entry, errors.get(entry.followed.key))

    def _looked(self, entry: _Awaited, error: Exception | None) -> None:
        now, seqno = self._runtime.monotonic(), entry.followed.seqno
        entry.is_looking = False
        if seqno != entry.seen:
            entry.seen, entry.in_vain = seqno, 0
        if error is None:
            entry.delays = self._runtime.delays()
            entry.not_before = now + (VAIN_S if entry.in_vain >= VAIN_MAX else 0)
            entry.due_at = now + self._timeout_s
        else:
            entry.followed.fail(error)
            self._supervisor.failures.report(f"following {entry.followed.label()}", error)
            entry.not_before = entry.due_at = now + next(entry.delays)
        if entry.is_hinted:
            self._ask(entry)
