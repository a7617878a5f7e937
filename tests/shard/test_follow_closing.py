"""Goal: who follows shards leaves nothing behind when it closes, also if a look at one was asked for in the
turn before. Seed 24295 of the worlds found a watch that went on for ever."""

import asyncio
from typing import Any

from aiopersist.base.runtime import SYSTEM
from aiopersist.base.supervisor import Supervisor
from aiopersist.shard.follow import Follower
from aiopersist.storage.memory import MemoryConsensus
from aiopersist.storage.watch import TaskWatch, Watch
from aiopersist.storage.wrapper import WrappedConsensus


class _Watched(WrappedConsensus):
    """A store that defines only `watch`."""

    def watch_together(self) -> Watch:
        return TaskWatch(self.watch)


class _Shard:
    """A shard that nothing happens to."""

    key, state, seqno, wanted = "shard", None, None, True

    async def refresh(self) -> None:
        return None

    def label(self) -> str:
        return "a shard"


async def test_a_look_that_was_asked_for_adds_no_watch() -> None:
    supervisor = Supervisor(SYSTEM)
    follower, shard = Follower(_Watched(MemoryConsensus()), 60.0, supervisor), _Shard()
    before = asyncio.all_tasks()
    one: Any = shard
    follower.follow(one)
    await asyncio.sleep(0.01)
    await supervisor.aclose()
    for entry in follower._entries.values():
        follower._ask(entry)  # as a look does that ends now, if a hint came meanwhile
    await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == before
