"""Tags with one fault: who adds one, who drops one, who reads one."""

from collections.abc import Awaitable, Callable
from typing import Any

import aiopersist as ap
from tests.cuts.scenes import scene
from tests.cuts.stage import NAME, SCHEMA, Stage
from tests.support.shards import Call

LAST = 2  # the last time of a shard that is filled


class Answer:
    """Whether a call happened, as far as its caller was told."""

    happened: bool | None = None

    async def of(self, call: Awaitable[Any]) -> None:
        try:
            await call
        except (ap.StorageUnavailable, ap.LeaseExpired, ap.BatchExpired):
            self.happened = False
            raise
        self.happened = True


async def tagged(s: Stage) -> Callable[[Any], Awaitable[None]]:
    """Fill the shard. The result checks what the tag `x` of its contents has."""
    await s.filled()
    rows = sorted((*row, 1) for told in s.told for row in told.rows)

    async def check(client: Any) -> None:
        assert (await client.tags(NAME))["x"].as_of == LAST
        async with client.reader(NAME, SCHEMA) as r, r.snapshot(tag="x") as snapshot:
            assert sorted(await snapshot.rows()) == rows

    return check


@scene
async def add_a_tag(s: Stage) -> Call:
    """Who was not told looks, or adds it again."""
    check, answer = await tagged(s), Answer()

    async def added() -> None:
        present = "x" in await s.client.tags(NAME)
        assert answer.happened in (None, present)
        try:
            await s.client.tag(NAME, "x", LAST)
        except ap.TagExists:
            assert present
        else:
            assert not present
        await check(s.client)

    s.after.append(added)
    s.afresh.append(check)
    return lambda: answer.of(s.client.tag(NAME, "x"))


@scene
async def drop_a_tag(s: Stage) -> Call:
    """Nobody else loses anything by it."""
    check, answer = await tagged(s), Answer()
    await s.client.tag(NAME, "x")
    await s.client.tag(NAME, "y", LAST)
    await s.client.admin.force_compaction(NAME)

    async def dropped() -> None:
        present = "y" in await s.client.tags(NAME)
        assert answer.happened in (None, not present)
        try:
            await s.client.untag(NAME, "y")
        except ap.UnknownTag:
            assert not present
        await check(s.client)

    async def gone(client: Any) -> None:
        assert {*await client.tags(NAME)} == {"x"}
        await check(client)

    s.after.append(dropped)
    s.afresh.append(gone)
    return lambda: answer.of(s.client.untag(NAME, "y"))


@scene
async def read_a_tag(s: Stage) -> Call:
    check = await tagged(s)
    await s.client.tag(NAME, "x")
    await s.client.admin.force_compaction(NAME)
    await s.client.admin.force_gc(NAME)
    s.after.append(lambda: check(s.client))
    s.afresh.append(check)
    return lambda: check(s.client)


@scene
async def share_the_read_of_a_tag(s: Stage) -> Call:
    check = await tagged(s)
    await s.client.tag(NAME, "x")
    await s.client.admin.force_compaction(NAME)

    async def call() -> None:
        rows: list[Any] = []
        async with s.client.workers.shared_read(NAME, tag="x") as shared:
            for piece in await shared.pieces(3):
                async for batch in s.client.workers.read_piece(piece):
                    rows += batch.to_pylist()
        assert len(rows) == sum(len(told.rows) for told in s.told)

    s.after.append(lambda: check(s.client))
    s.afresh.append(check)
    return call
