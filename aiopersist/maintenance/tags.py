"""Tags: contents of a shard at one time that stay, whatever becomes of its history."""

from datetime import datetime, timedelta
from functools import partial
from typing import Any

from pydantic import BaseModel

from aiopersist.base.errors import (
    BatchExpired,
    InvalidUsage,
    NotReadable,
    SinceViolation,
    TagExists,
    UsageKind,
    shown,
)
from aiopersist.base.frontier import Antichain, Time, last_before, minimum, shaped
from aiopersist.gc.rollup import discard_rollup, put_rollup
from aiopersist.maintenance.background import Maintenance
from aiopersist.shard.catalog import check_name
from aiopersist.shard.commit import commit
from aiopersist.shard.instant import as_int, close_if_passed, time_of
from aiopersist.shard.registration import Registration
from aiopersist.shard.shard import Shard
from aiopersist.shard.shards import Shards
from aiopersist.state.model import Rollup, State, Tag
from aiopersist.state.tagging import AddTag, DropTag, tagged


class TagView(BaseModel, frozen=True):
    """A tag of a shard."""

    as_of: int | tuple[int, ...]
    """The time of its contents."""
    seqno: int
    """The version whose contents at that time it keeps."""
    added_at: float
    """In Unix seconds of the consensus store's clock."""
    expires_at: float | None
    """The first commit after this moment drops it; `None`: it stays until `untag`."""
    parts: int
    """Blobs of parts that it names."""
    blob_bytes: int
    """The bytes of these blobs; other tags, and the newest contents, may name them, too."""

    @classmethod
    def of(cls, tag: Tag) -> "TagView":
        time = tag.as_of.time
        assert time is not None
        return cls(
            as_of=time,
            seqno=tag.seqno,
            added_at=tag.at,
            expires_at=tag.expires_at,
            parts=len(tag.parts),
            blob_bytes=tag.blob_bytes,
        )


async def add_tag(
    shards: Shards,
    maintenance: Maintenance,
    shard_name: str,
    name: str,
    as_of: Time | datetime | None,
    expires: timedelta | None,
) -> TagView:
    """See `Client.tag`."""
    lasts_s = _seconds(expires)
    shard = await shards.existing(shard_name)
    time = await _complete_time(shard, as_of)
    await _check_addable(shard, check_name(name), time)  # before a registration
    job = partial(_added, shard, name, time, lasts_s)
    return TagView.of(await maintenance.of(shard).registration.under(job))


async def tags(shards: Shards, shard_name: str) -> dict[str, TagView]:
    """See `Client.tags`."""
    return views_of_tags((await shards.existing(shard_name)).state)


def views_of_tags(state: State) -> dict[str, TagView]:
    """The tags of a state, by name."""
    return {name: TagView.of(tag) for name, tag in sorted(state.tags.items())}


async def drop_tag(shards: Shards, shard_name: str, name: str) -> None:
    """See `Client.untag`."""
    shard = await shards.existing(shard_name)
    await commit(shard.register, DropTag(check_name(name)))


def _seconds(expires: object) -> float | None:
    if expires is None:
        return None
    if isinstance(expires, timedelta) and expires > timedelta(0):
        return expires.total_seconds()
    text = f"expires={shown(expires)}: give a positive timedelta, or None"
    raise InvalidUsage(UsageKind.INVALID_TIME, text, time=expires)


async def _complete_time(shard: Shard, as_of: Time | datetime | None) -> Time:
    """`as_of` as a complete time of the shard, by default the greatest; `NotReadable` for a later one."""
    upper, length = shard.state.upper, shard.schema(shard.state.schema_id).time_length
    if as_of is None:
        if length is not None:
            raise InvalidUsage(UsageKind.INVALID_TIME, "product times have no greatest time: give as_of")
        if upper == minimum(None):
            raise NotReadable(None, upper, shard_id=shard.id)
        return last_before(upper)
    at: Any = time_of(as_of, shard)
    time = shaped(at, length).elements[0]
    if isinstance(as_of, datetime):
        await close_if_passed(shard, as_int(time))
    if shard.state.upper.less_equal(time):
        raise NotReadable(time, shard.state.upper, shard_id=shard.id)
    return time


async def _check_addable(shard: Shard, name: str, as_of: Time) -> None:
    """`SinceViolation`, `TagExists`, by the state as it is known."""
    present = shard.state.tags.get(name)
    if present is not None and not present.has_expired(await shard.register.now()):
        raise TagExists(name, shard_id=shard.id)
    if not shard.state.since.less_equal(as_of):
        raise SinceViolation(as_of, shard.state.since, shard_id=shard.id)


async def _added(
    shard: Shard, name: str, as_of: Time, lasts_s: float | None, registration: Registration
) -> Tag:
    """The tag, of the newest state. Begins again if a compaction has replaced one of its parts meanwhile."""
    while True:
        await shard.open()
        await _check_addable(shard, name, as_of)
        contents = tagged(shard.state, as_of)
        rollup = await put_rollup(shard, contents, registration.writer)
        tag = _tag(contents, as_of, await shard.register.now(), lasts_s, rollup)
        try:
            is_added = await commit(shard.register, AddTag(registration.writer, name, tag))
        except (BatchExpired, TagExists):
            discard_rollup(shard, rollup)
            raise
        if is_added:
            return tag
        discard_rollup(shard, rollup)


def _tag(contents: State, as_of: Time, now: float, lasts_s: float | None, rollup: Rollup) -> Tag:
    blobs = {part.key: part.size for part in contents.parts if part.key is not None}
    return Tag(
        seqno=contents.seqno,
        as_of=Antichain(as_of),
        at=now,
        expires_at=None if lasts_s is None else now + lasts_s,
        rollup=rollup,
        parts=tuple(blobs),
        blob_bytes=sum(blobs.values()),
    )
