"""Opens an `Indexed`, to own it or to follow it."""

from aiopersist.base.resource import Opening, Scope
from aiopersist.indexed.commands import Leave, TakeOver
from aiopersist.indexed.core import Core
from aiopersist.indexed.errors import UnknownStream
from aiopersist.indexed.indexed import Indexed
from aiopersist.shard import catalog
from aiopersist.shard.catalog import IndexedId
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards
from aiopersist.shard.stack import Stack


def open_indexed(shards: Shards, name: str, *, readonly: bool, background: bool) -> Opening[Indexed]:
    """See `Client.indexed`."""
    return shards.opening(
        lambda: _opened(shards.stack, shards.scope, name, readonly=readonly, background=background),
        f"client.indexed({name!r})",
    )


async def _opened(stack: Stack, scope: Scope, name: str, *, readonly: bool, background: bool) -> Indexed:
    """The `Indexed` of that name. It has its own view of the state, so other instances in this process are
    like other processes. A request for the name, one for the state, two commits (one for a reader)."""
    await stack.ready_to_convert()
    if readonly:
        shard_id = await catalog.find(stack, name, IndexedId)
        shard = None if shard_id is None else Shard(stack, shard_id, name)
        if shard is None or await shard.register.refresh() is None:
            raise UnknownStream(f"there is no Indexed named {name!r}")
        owner = None
    else:
        shard = Shard(stack, await catalog.resolve_or_create(stack, name, IndexedId), name)
        owner = f"w{stack.runtime.uuid()}"
        await shard.register.refresh()
        await commit(shard.register, TakeOver(shard.id, owner))
    try:
        await shard.open()
        await shard.hold.acquire()
        return Indexed(shard, Core(shard, owner), scope, background=background)
    except BaseException:
        stack.supervisor.spawn(_leave(shard, owner), "leave an Indexed that was not opened")
        raise


async def _leave(shard: Shard, owner: str | None) -> None:
    if owner is not None:
        await commit(shard.register, Leave(owner))
    await shard.hold.release()
