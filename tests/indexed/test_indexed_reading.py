"""Goal: reads of an `Indexed` agree with a plain list of updates, also after drains, trims and merges; a
snapshot and the events after it give every update once; maintenance does as documented."""

import random
import uuid
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.indexed import Indexed, Stream, StreamSnapshot
from tests.indexed.indexed_reading_kit import (
    TINY,
    at,
    check_view,
    drained,
    plain,
    read,
    rows_of,
    settle_down,
    split_rows,
    stream_of,
    summed,
    take_all,
    take_rows,
)
from tests.support.schemas import INT_MAX, Row


class Game:
    """An `Indexed` with two streams, and beside it the plain lists of what was written."""

    def __init__(self, ix: Indexed, rng: random.Random, streams: list[Stream[str, int]]) -> None:
        self.ix = ix
        self.rng = rng
        self.streams = streams
        self.written: dict[str, list[Row]] = {s.name: [] for s in streams}
        self.seal = dict.fromkeys(self.written, 0)
        self.since = dict.fromkeys(self.written, 0)
        self.seqno = 0
        self.requests: list[Any] = []

    def updates(self, stream: Stream[str, int]) -> list[Row]:
        rng, seal = self.rng, self.seal[stream.name]
        if rng.random() < 0.2 and self.written[stream.name]:  # taken back
            chosen = rng.choices(self.written[stream.name], k=5)
            return [(k, v, t, -d) for k, v, t, d in chosen if t >= seal]
        return [
            (f"k{rng.randrange(5)}", rng.randrange(3), seal + rng.randrange(12), rng.choice([1, 1, 2, -1]))
            for _ in range(rng.choice([0, 1, 3, 15]))
        ]

    async def move(self, *, maintains: bool = True) -> None:
        rng, ix = self.rng, self.ix
        choices = ["write", "seal", "since", "step", "compact", "fail"][: 6 if maintains else 3]
        what = rng.choices(choices, [5, 3, 2, 4, 3, 1][: len(choices)])[0]
        stream = rng.choice(self.streams)
        name = stream.name
        if what == "write":
            entries = [(s, self.updates(s)) for s in rng.choices(self.streams, k=2)]
            self.seqno = await ix.write(entries)
            for s, rows in entries:
                self.written[s.name] += rows
        elif what == "seal":
            self.seal[name] += rng.choice([0, 1, 4])
            self.seqno = await ix.seal([stream], self.seal[name])
        elif what == "since":
            self.since[name] = max(self.since[name], self.seal[name] + rng.choice([-3, -1, 0, 2]))
            self.seqno = await ix.allow_compaction([(stream, self.since[name])])
        elif what == "step":
            self.requests += await ix.step()
        elif self.requests:
            request = self.requests.pop()
            failed = what == "fail"
            await ix.apply(request.stream, RuntimeError() if failed else await ix.compact(request))

    async def check(self) -> None:
        for stream in self.streams:
            name = stream.name
            check_view(await self.ix.inspect(stream))
            async with await self.ix.snapshot(stream) as snapshot:
                await self.check_snapshot(snapshot, name)

    async def check_snapshot(self, snapshot: StreamSnapshot[Any, Any], name: str) -> None:
        since = self.since[name]
        assert snapshot.seqno == self.seqno
        assert (snapshot.since, snapshot.seal) == (ap.Antichain(since), ap.Antichain(self.seal[name]))
        rows = plain(await snapshot.rows())
        assert summed(rows) == summed(self.written[name], since)
        assert all(time >= since for _, _, time, _ in rows)
        pieces = await split_rows(snapshot, self.rng.choice([1, 2, 5]))
        assert sorted(row for piece in pieces for row in piece) == sorted(rows)


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
async def test_the_same_contents_before_and_after_every_step(either: Indexed, seed: int) -> None:
    """Goal: writes, seals, since beyond seal, drains, trims and merges in any order: the model's contents."""
    ix, rng = either, random.Random(seed)
    game = Game(ix, rng, [await stream_of(ix, "a"), await stream_of(ix, "b")])
    kept: list[tuple[StreamSnapshot[Any, Any], list[Row]]] = []
    _, events = await ix.listen(game.streams[0])
    for number in range(36):
        await game.move()
        await game.check()
        if number % 10 == 5:
            snapshot = await ix.snapshot(rng.choice(game.streams))
            kept.append((snapshot, sorted(plain(await snapshot.rows()))))
    await settle_down(ix)
    await game.check()
    for snapshot, rows in kept:
        assert sorted(plain(await snapshot.rows())) == rows
        await snapshot.aclose()
    heard: list[Any] = []
    while len(rows_of(heard)) < len(game.written["a"]) or game.seal["a"] not in [0, *heard]:
        heard += await take_all(events, 1)
    assert rows_of(heard) == game.written["a"]
    assert [item for item in heard if isinstance(item, int)][-1:] in ([], [game.seal["a"]])


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
async def test_the_same_contents_over_take_overs_and_backends(location: Any, seed: int) -> None:
    """Goal: a new owner, a reader and the garbage collection between them change nothing of it."""
    options = ap.Settings(**TINY, rollup_every=4)
    rng = random.Random(seed)
    async with (
        ap.open(blob=location.blob, consensus=location.consensus, settings=options) as client,
        ap.open(blob=location.blob, consensus=location.consensus) as other,
    ):
        game: Game | None = None
        for _ in range(2):
            async with client.indexed("ix", background=False) as ix:
                streams = [await stream_of(ix, "a"), await stream_of(ix, "b")]
                game = game or Game(ix, rng, streams)
                game.ix, game.streams, game.requests = ix, streams, []
                for _ in range(12):
                    await game.move()
                await settle_down(ix)
                await game.check()
                async with other.indexed("ix", readonly=True) as reader:
                    for stream in streams:
                        async with await reader.snapshot(stream) as snapshot:
                            await game.check_snapshot(snapshot, stream.name)


async def test_since_beyond_the_seal_advances_all_that_is_read(either: Indexed) -> None:
    """Goal: also what is written later, and what was merged physically at times beyond its upper."""
    ix = either
    a = await stream_of(ix)
    await ix.write([(a, at(0, 1, 5))])
    await ix.seal([a], 2)
    await ix.step()
    await ix.write([(a, at(2, 3, 9))])
    await ix.seal([a], 4)
    await ix.step()
    await ix.allow_compaction([(a, 7)])
    wanted = summed(at(0, 1, 5, 2, 3, 9), 7)
    assert summed(await read(ix, a)) == wanted
    (request,) = await ix.step()
    await ix.apply("a", await ix.compact(request))
    view = await ix.inspect(a)
    assert (view.seal, view.since, view.trace_upper) == (4, 7, 4)
    assert view.trace[0][:3] == (0, 4, 7)
    async with await ix.snapshot(a) as snapshot:
        assert {u.time for u in (await snapshot.trace_rows())} == {7}  # beyond its upper
        assert summed(await snapshot.rows()) == wanted
        assert (snapshot.since, snapshot.seal) == (ap.Antichain(7), ap.Antichain(4))
    await ix.write([(a, at(4, 6, 8))])
    await ix.seal([a], 6)
    await settle_down(ix)
    assert summed(await read(ix, a)) == summed(at(0, 1, 5, 2, 3, 9, 4, 6, 8), 7)
    await ix.allow_compaction([(a, INT_MAX)])
    await settle_down(ix)
    assert {row[2] for row in await read(ix, a)} == {INT_MAX}


@pytest.mark.parametrize("seed", [0])
async def test_the_same_contents_while_the_background_is_at_work(seed: int) -> None:
    options = ap.Settings(**TINY, indexed_step_s=0.001, rollup_every=4)
    rng = random.Random(seed)
    async with ap.open("mem://", settings=options) as client, client.indexed("ix") as ix:
        game = Game(ix, rng, [await stream_of(ix, "a"), await stream_of(ix, "b")])
        _, events = await ix.listen(game.streams[1])
        for _ in range(40):
            await game.move(maintains=False)
            await game.check()
        assert await take_rows(events, len(game.written["b"])) == game.written["b"]
        counters = ix.counters()
        assert counters["compactions"] > 0
        assert counters["failed_steps"] == counters["failed_commands"] == 0


async def test_batches_keep_their_order_through_rollups() -> None:
    """Goal: seqnos and times of several digits are numbers, not text, for the next instance."""
    options = ap.Settings(**TINY, rollup_every=2)
    url = f"mem://{uuid.uuid4().hex}"
    async with ap.open(url, settings=options) as client, client.indexed("ix", background=False) as ix:
        a = await stream_of(ix)
        for seal in (2, 9, 11, 99, 100, 1005):
            await ix.write([(a, at(seal - 1, 10**6))])
            await ix.seal([a], seal)
            for _ in range(3):
                await ix.step()
        for t in range(12):
            await ix.write([(a, at(2000 + t))])
            await ix.step()
        view, rows = await ix.inspect(a), await read(ix, a)
    assert [batch[0] for batch in view.trace] == [0, 2, 9, 11, 99, 100]
    check_view(view)
    async with ap.open(url) as other:
        for readonly in (True, False):
            async with other.indexed("ix", readonly=readonly, background=False) as again:
                assert await again.inspect("a") == view
                stream = await again.load("a", str, int)
                assert stream is not None
                assert await read(again, stream) == rows


async def test_sweeping_leaks_spares_what_is_named_and_what_is_being_made() -> None:
    """Goal: neither live blobs nor the output of a compaction under way are leaks; a former owner's is."""
    url = f"mem://{uuid.uuid4().hex}"

    async def parts() -> int:
        return len([key async for key, _ in ap.open_blob(url).list("") if key.endswith(".parquet")])

    async with ap.open(url) as other:
        async with (
            ap.open(url, settings=ap.Settings(**TINY)) as client,
            client.indexed("ix", background=False) as ix,
        ):
            a = await stream_of(ix)
            await drained(ix, a, [at(*range(10)), at(*range(10, 20))])
            await ix.allow_compaction([(a, 20)])
            (request,) = await ix.step()
            response = await ix.compact(request)
            await other.sweep_leaked_blobs(dry_run=False)
            await ix.apply("a", response)
            assert len(await read(ix, a)) == 20
            await drained(ix, a, [at(*range(20, 30)), at(*range(30, 40))])
            await ix.allow_compaction([(a, 40)])
            (request,) = await ix.step()
            await ix.compact(request)  # its response is lost
            leaked = await parts()
        await other.sweep_leaked_blobs(dry_run=False)
        assert await parts() < leaked
        async with other.indexed("ix", background=False) as again:
            stream = await again.load("a", str, int)
            assert stream is not None
            assert len(await read(again, stream)) == 40
            await other.sweep_leaked_blobs(dry_run=False)
            assert len(await read(again, stream)) == 40
