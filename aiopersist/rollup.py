"""Rollups: the full state of a shard in the blob store, so that opening it reads few versions.

Written beside the commits, from the state in memory, and named by a commit of its own. Whoever
commits version `n * rollup_every` owes the rollup; when that one died, any commit a quarter later
does. Two that do it at once cost an upload: the older one is not named.
"""

from collections.abc import Callable

from aiopersist.errors import BatchExpired
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard
from aiopersist.state.diff import checksum_of, encode_rollup
from aiopersist.state.lifecycle import AddRollup
from aiopersist.state.model import Rollup, State
from aiopersist.state.writing import RegisterWriter


def due(state: State, every: int) -> bool:
    """Whether the process that has just committed `state` owes a rollup."""
    behind = state.seqno - (state.latest_rollup or 0)
    return not state.finalized and behind >= every and (state.seqno % every == 0 or behind * 4 >= every * 5)


async def write_rollup(
    shard: Shard, writer: str | None = None, remember: Callable[[str], None] = lambda writer: None
) -> str:
    """Write the current state of `shard` under `writer`, and name it; returns the writer, which is a
    fresh one if that is not registered any more: an id never comes back. One blob and one commit,
    one commit more to register. `remember` is told a fresh writer before it is registered, so that it
    serves the next rollup, whatever becomes of this one."""
    stack, slot, state = shard.stack, Slot(), shard.state
    if writer is None or writer not in state.writers:
        writer = f"w{stack.runtime.uuid()}"
        remember(writer)
        await commit(shard.register, RegisterWriter(writer, stack.settings.writer_lease_s), slot)
        state = shard.state
    data = await stack.compute(encode_rollup, state)
    key = f"{shard.id}/{writer}/{stack.runtime.uuid()}.rollup"
    await stack.blob.set(key, data)
    rollup = Rollup(key=key, checksum=checksum_of(data), size=len(data))
    command = AddRollup(writer, state.seqno, rollup, stack.settings.txn_retention_s)
    try:
        named = await commit(shard.register, command, slot)
    except BatchExpired:
        named = False
    if not named:
        await stack.blob.delete([key])
    return writer
