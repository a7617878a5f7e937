"""The end of a shard: finalized, its data deleted, its name freed."""

from aiopersist.base.errors import InvalidUsage, UnknownShard, UsageKind
from aiopersist.gc.collect import delete_data
from aiopersist.shard.catalog import free, resolve
from aiopersist.shard.commit import commit
from aiopersist.shard.shards import Shards
from aiopersist.state.lifecycle import Finalize


async def drop(shards: Shards, name: str) -> None:
    """See `Admin.drop`."""
    shard_id = await resolve(shards.stack, name)
    shard = shards.at(shard_id, name)
    state = await shard.register.refresh()
    if state is None and name == shard_id:
        raise UnknownShard(f"there is no {shard.label}", shard_id=shard_id)
    await commit(shard.register, Finalize(shard_id))
    await delete_data(shard)  # first: after a crash, a repetition still finds the shard by its name
    await free(shards.stack, name, shard_id)


async def finalize(shards: Shards, name: str) -> None:
    """See `Admin.finalize`."""
    shard = shards.at(await resolve(shards.stack, name), name)
    state = await shard.register.refresh()
    if state is None:
        raise UnknownShard(f"there is no {shard.label}", shard_id=shard.id)
    since, upper = state.since, state.upper
    if not state.finalized and (since.elements or upper.elements):
        message = f"since {since} and upper {upper} are not both empty"
        kind = UsageKind.FINALIZATION_ERROR
        raise InvalidUsage(kind, message, shard_id=shard.id, since=since, upper=upper)
    await commit(shard.register, Finalize(shard.id))
    await delete_data(shard)
