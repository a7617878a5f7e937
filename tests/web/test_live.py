"""Goal: live changes reach their visitors; one that takes nothing is given up, with what it holds, and
there are not too many."""

import asyncio

import pytest

import aiopersist as ap
from aiopersist.shard.shard import Shard
from aiopersist.table.handle import opened
from aiopersist.web import contents_page, inspector
from tests.fastapi.caller import GUARD_S, Caller


def visitor(app: object) -> Caller:
    caller = Caller(app, "/live?name=t")
    caller._scope["asgi"]["spec_version"] = "2.3"  # as servers say
    return caller


async def events(caller: Caller, count: int) -> None:
    await caller._until(lambda: caller.body.count(b"data: ") >= count)


async def until_it_holds(shard: Shard, needs: int) -> None:
    async with asyncio.timeout(GUARD_S):
        while sum(shard.hold._pins.values()) != needs:
            await asyncio.sleep(0.01)


async def test_a_visitor_that_takes_nothing_is_given_up(
    mem: ap.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contents_page, "LIVE_SEND_S", 0.05)
    table = mem.table("t", str, int)
    await table.put("a", 1)
    shard = (await opened(table)).shard
    before = sum(shard.hold._pins.values())
    async with visitor(inspector(mem)) as caller:
        await events(caller, 1)
        await until_it_holds(shard, before + 1)
        caller.reading.clear()
        await table.put("a", 2)
        await caller.done()
        assert not caller.ended
        await until_it_holds(shard, before)


async def test_there_are_not_too_many(mem: ap.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contents_page, "LIVE_MAX", 1)
    await mem.table("t", str, int).put("a", 1)
    app = inspector(mem)
    async with visitor(app) as first:
        await events(first, 1)
        async with visitor(app) as second:
            await second.done()
            assert second.status == 503
    async with visitor(app) as second:
        await events(second, 1)
