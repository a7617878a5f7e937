"""Rollups: the full state of a shard in the blob store, so that opening it reads few versions.

A rollup is written beside the commits, from the state in memory, and a commit of its own names it. After
three quarters of `rollup_every` versions it follows a compaction, since the state then has few parts.
Otherwise the process that commits version `n * rollup_every` must write it. If that process died, or did not
look, any process writes it a quarter later. It waits for a small compaction, up to half as many versions
more. The claim of the collection prevents two processes from writing it at once.
"""

from aiopersist.base.errors import BatchExpired
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard
from aiopersist.state.ids import Ids
from aiopersist.state.lifecycle import AddRollup, ForgetTransactions
from aiopersist.state.model import Rollup, State
from aiopersist.state.rollup_file import checksum_of, encode_rollup

FORGOTTEN_AT_ONCE = 4096  # applications in one version: some hundred kB, and applied in milliseconds


def due(state: State, every: int) -> bool:
    """Whether the process that has just committed `state` must write a rollup."""
    behind = versions_behind(state)
    return not state.finalized and behind >= every and (state.seqno % every == 0 or behind * 4 >= every * 5)


def versions_behind(state: State) -> int:
    """The number of versions since the latest rollup."""
    return state.seqno - (state.latest_rollup or 0)


async def write_rollup(shard: Shard, writer: str) -> bool:
    """Write the current state of `shard` under the registered `writer`, and name the rollup; `False` if a
    newer one is named. One blob and one commit, and further commits to forget transaction numbers that were
    unused for `settings.txn_retention_s`. `BatchExpired` if the writer is not registered."""
    state = shard.state
    rollup = await put_rollup(shard, state, writer)
    try:
        named: bool = await commit(shard.register, AddRollup(writer, state.seqno, rollup))
    except BatchExpired:
        discard_rollup(shard, rollup)
        raise
    if not named:
        await shard.stack.blob.delete([rollup.key])
    else:
        await _forget_transactions(shard, state)
    return named


async def put_rollup(shard: Shard, state: State, writer: str) -> Rollup:
    """Write this state of `shard` under the registered `writer`: one blob, which no version names yet."""
    stack = shard.stack
    data = await stack.compute(encode_rollup, state)
    key = f"{shard.id}/{writer}/{stack.runtime.uuid()}.rollup"
    await stack.blob.set(key, data)
    return Rollup(key=key, checksum=checksum_of(data), size=len(data))


def discard_rollup(shard: Shard, rollup: Rollup) -> None:
    """Begin to delete a rollup that no version names, and none ever will."""
    deletion = shard.stack.blob.delete([rollup.key])
    shard.stack.supervisor.spawn(deletion, "delete a rollup that came too late")


async def _forget_transactions(shard: Shard, state: State) -> None:
    if not state.transactions:
        return
    oldest = await shard.stack.consensus.now() - shard.stack.settings.txn_retention_s
    stale = await shard.stack.compute(_last_used_before, state, oldest)
    for begin in range(0, len(stale), FORGOTTEN_AT_ONCE):
        apps = stale[begin : begin + FORGOTTEN_AT_ONCE]
        await commit(shard.register, ForgetTransactions(apps, oldest))


def _last_used_before(state: State, oldest: float) -> list[str]:
    pages = Ids.of(state.transactions).pages()
    return [app for page in pages for app, last in page.items() if last.at < oldest]
