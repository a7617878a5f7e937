"""Rollups: the full state of a shard in the blob store, so that opening it reads few versions.

Written beside the commits, from the state in memory, and named by a commit of its own. Whoever
commits version `n * rollup_every` owes the rollup; when that one died, any commit a quarter later
does. A claim of the collection keeps two from doing it at once.
"""

from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard
from aiopersist.state.diff import checksum_of, encode_rollup
from aiopersist.state.lifecycle import AddRollup
from aiopersist.state.model import Rollup, State


def due(state: State, every: int) -> bool:
    """Whether the process that has just committed `state` owes a rollup."""
    behind = state.seqno - (state.latest_rollup or 0)
    return not state.finalized and behind >= every and (state.seqno % every == 0 or behind * 4 >= every * 5)


async def write_rollup(shard: Shard, writer: str) -> bool:
    """Write the current state of `shard` under the registered `writer`, and name it; `False` if a newer
    one is named already. One blob and one commit. `BatchExpired` if the writer is not registered."""
    stack, state = shard.stack, shard.state
    data = await stack.compute(encode_rollup, state)
    key = f"{shard.id}/{writer}/{stack.runtime.uuid()}.rollup"
    await stack.blob.set(key, data)
    rollup = Rollup(key=key, checksum=checksum_of(data), size=len(data))
    command = AddRollup(writer, state.seqno, rollup, stack.settings.txn_retention_s)
    named: bool = await commit(shard.register, command, Slot())
    if not named:
        await stack.blob.delete([key])
    return named
