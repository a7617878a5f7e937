"""The contents that a tag keeps: a version with its batches, in a rollup of its own."""

from typing import NamedTuple

from aiopersist.base.errors import Error, InvalidUsage, MissingPart, UnknownTag, UsageKind
from aiopersist.base.frontier import Time
from aiopersist.shard.log import read_rollup
from aiopersist.shard.shard import Shard
from aiopersist.state.model import State


class TaggedContents(NamedTuple):
    """The contents that a tag keeps."""

    name: str
    contents: State
    """Its batches have the contents."""
    as_of: Time


def check_alone(*times: object) -> None:
    """`INVALID_TIME` if a time is given beside a tag, which has its own."""
    for time in times:
        if time is not None:
            raise InvalidUsage(UsageKind.INVALID_TIME, "give a tag or a time, not both", time=time)


def check_tag(state: State, name: str) -> None:
    """`UnknownTag` if the state has no tag of that name."""
    if name not in state.tags:
        raise UnknownTag(name, shard_id=state.shard)


async def read_tag(shard: Shard, state: State, name: str) -> TaggedContents:
    """The contents that the tag keeps. `UnknownTag` if `state` has no such tag. One request. The caller holds
    the versions from `state` on, so that the blobs stay if the tag is dropped meanwhile."""
    check_tag(state, name)
    tag = state.tags[name]
    contents = await read_rollup(shard.stack, tag.rollup.key, tag.rollup.checksum)
    if contents is None:
        raise await _missing(shard, name)
    time = tag.as_of.time
    assert time is not None  # a tag has one time
    return TaggedContents(name, contents, time)


async def _missing(shard: Shard, name: str) -> Error:
    """The error for a tag without its rollup: nothing holds versions for a readonly client."""
    if name not in (state := await shard.open()).tags:
        return UnknownTag(name, shard_id=shard.id)
    text = f"tag {name!r} names rollup {state.tags[name].rollup.key}, and the blob store does not have it"
    return MissingPart(text, shard_id=shard.id)
