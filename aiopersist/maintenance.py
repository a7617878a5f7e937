"""Decides when the background work of a client runs, and runs it. Each task does one thing and ends;
a failure is logged, and a commit some versions later that owes the same tries again."""

import asyncio
from functools import partial
from weakref import WeakKeyDictionary

from aiopersist.rollup import due, write_rollup
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.model import State


class Maintenance:
    """The upkeep of the shards of one client."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._writers: WeakKeyDictionary[Shard, str] = WeakKeyDictionary()
        self._not_before: WeakKeyDictionary[Shard, int] = WeakKeyDictionary()  # versions, after a failure
        self._running: WeakKeyDictionary[Shard, asyncio.Task[None]] = WeakKeyDictionary()

    def tend(self, shard: Shard) -> None:
        """From now on do what the commits of `shard` owe."""
        shard.register.on_commit = partial(self._owed, shard)

    def _owed(self, shard: Shard, state: State) -> None:
        running = self._running.get(shard)
        if state.seqno < self._not_before.get(shard, 0):
            return
        if due(state, self._stack.settings.rollup_every) and (running is None or running.done()):
            work = self._roll_up(shard)
            self._running[shard] = self._stack.supervisor.background(work, f"roll up {shard.id}")

    async def _roll_up(self, shard: Shard) -> None:
        try:
            await write_rollup(shard, self._writers.get(shard), partial(self._writers.__setitem__, shard))
        except Exception:
            pause = max(1, self._stack.settings.rollup_every // 4)
            self._not_before[shard] = shard.state.seqno + pause
            raise
