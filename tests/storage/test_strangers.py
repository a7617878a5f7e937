"""Goal: while something between answers in place of a real store, before or after it has done the work,
nothing is lost, done twice or told wrongly.

Each game is drawn from its seed; how its requests interleave is not. `AIOPERSIST_TEST_STRANGERS` says how
many the long run plays."""

import asyncio
import os
import random
import re
from collections import Counter
from contextlib import suppress
from email.utils import formatdate
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.runtime import SYSTEM
from tests.storage.answers_kit import PAGES, foreign
from tests.storage.http_proxy import Cut, Got, Sent, http_proxy
from tests.support.obstore_s3 import by_obstore
from tests.support.schemas import SCHEMA

GAMES = int(os.environ.get("AIOPERSIST_TEST_STRANGERS", "30"))
STATUSES = (400, 403, 404, 408, 409, 412, 416, 429, 500, 502, 503, 504)
STEPS = 12  # of each program
DAY = 86400
LIMITS: Any = {"inline_writes_single_max_bytes": 40, "blob_target_size": 500, "watch_timeout_s": 0.2}


class Stranger:
    """What answers. `rate`: to how many requests; it stops when `is_over`."""

    def __init__(self, dice: random.Random, rate: float) -> None:
        self.dice = dice
        self.rate = rate
        self.is_over = False
        self.counts: Counter[str] = Counter()

    def instead(self, sent: Sent) -> bytes | None:
        """Before the store has heard of it."""
        if self.is_over or self.dice.random() >= self.rate / 3:
            return None
        self.counts["instead"] += 1
        return self.answer()

    def after(self, sent: Sent, got: Got) -> bytes:
        """When the store has done the work."""
        whole = got.head + got.body
        if self.is_over or self.dice.random() >= self.rate:
            return whole
        how = self.dice.choice(["answer", "answer", "answer", "answer", "nothing", "cut", "dated"])
        self.counts[f"{how} {sent.method}"] += 1
        if how == "answer":
            return self.answer()
        if how == "dated":
            return re.sub(rb"(?i)(\r\ndate: )[^\r]*", rb"\g<1>" + self.date().encode(), got.head) + got.body
        return b"" if how == "nothing" else Cut(whole[: self.dice.randrange(1, len(whole))])

    def answer(self) -> bytes:
        """Of its own."""
        if self.dice.random() < 0.1:
            return foreign(200, "page", f"Date: {self.date()}")
        page = self.dice.choice(sorted(PAGES))
        return foreign(self.dice.choice(STATUSES), page, f"Date: {self.date()}")

    def date(self) -> str:
        ahead_s = self.dice.choice([400 * DAY, -400 * DAY, 7200, -7200])
        dates = [formatdate(SYSTEM.wall() + ahead_s, usegmt=True), "Sat, 01 Jan 99999 00:00:00 GMT"]
        return self.dice.choice(dates)


class Game:
    """The programs, and what they were told."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(f"programs {seed}")
        self.told: Counter[tuple[str, int]] = Counter()
        self.adds = 0
        self.rows: dict[str, int] = {}
        self.times: list[int] = []

    async def writes(self, client: ap.Client, name: str) -> None:
        """With an id and without; a call with an id is made twice."""
        async with client.writer("w", SCHEMA) as w:
            for number in range(STEPS):
                row = (name * self.dice.choice([1, 60]), number)
                once = self.dice.choice([None, f"{name} {number}"])
                for _ in range(1 if once is None else 2):
                    await w.write([row], once=once)
                self.told[row] += 1

    async def adds_up(self, client: ap.Client) -> None:
        table = client.table("t", key=str, val=int)

        async def one_more(tx: Any) -> None:
            tx.put(table, "all", (await tx.get(table, "all") or 0) + 1)

        for _ in range(STEPS):
            await client.transact(one_more)
            self.adds += 1

    async def puts(self, client: ap.Client, name: str) -> None:
        table = client.table("t", key=str, val=int)
        for number in range(STEPS):
            key = f"{name} {self.dice.randrange(5)}"
            self.times.append(await table.put(key, number))
            self.rows[key] = number
            assert await table.get(key) == number
            fresh = f"{name} only {number}"
            await table.insert(fresh, number)
            self.rows[fresh] = number

    async def keeps(self, client: ap.Client) -> None:
        """Compacts and collects while the others work."""
        while True:
            for name in ("w", "t"):
                with suppress(ap.UnknownShard):
                    await client.admin.force_compaction(name)
                    await client.admin.force_gc(name)
                    await client.admin.sweep_leaked_blobs(dry_run=False)
            await asyncio.sleep(0.2)

    async def check(self, client: ap.Client) -> None:
        async with client.reader("w", SCHEMA) as r, r.snapshot() as s:
            found = Counter({(key, val): diff for key, val, diff in await s.rows()})
        assert found == self.told, (found - self.told, self.told - found)
        table = client.table("t", key=str, val=int)
        assert {key: val async for key, val in table.items()} == {**self.rows, "all": self.adds}
        assert [(await client.admin.fsck(name)).problems for name in ("w", "t")] == [[], []]
        latest = 1_000_000 * (SYSTEM.wall() + 60)
        assert all(time < latest for time in self.times)

    def programs(self, one: ap.Client, other: ap.Client) -> list[Any]:
        """All of them, begun."""
        calls = [self.writes(one, "a"), self.writes(other, "b"), self.adds_up(one), self.adds_up(other)]
        return [*calls, self.puts(one, "a"), self.puts(other, "b")]


async def play(url: str, seed: int) -> Counter[str]:
    """One game; what was answered by whom."""
    dice = random.Random(seed)
    url = dice.choice([url, by_obstore(url)])
    stranger, game = Stranger(dice, dice.choice([0.03, 0.1, 0.2])), Game(seed)
    settings = ap.Settings(**LIMITS)
    async with http_proxy(url) as (proxy, through):
        async with (
            ap.open(through, maintenance=False, settings=settings) as one,
            ap.open(through, maintenance=False, settings=settings) as other,
        ):
            proxy.instead, proxy.after = stranger.instead, stranger.after
            keeping = asyncio.create_task(game.keeps(other))
            await asyncio.gather(*game.programs(one, other))
            stranger.is_over = True
            keeping.cancel()
            await asyncio.wait([keeping])
            if not keeping.cancelled():
                keeping.result()
    async with ap.open(url, maintenance=False) as honest:
        await game.check(honest)
    return stranger.counts


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
async def test_some_games(best_s3_url: str, seed: int) -> None:
    counts = await play(best_s3_url, seed)
    assert counts["answer PUT"] and counts["answer GET"], counts


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(100, 100 + GAMES))
async def test_many_games(best_s3_url: str, seed: int) -> None:
    print(await play(best_s3_url, seed))
