"""Goal: the contents of a stream of an `Indexed` are the sum of its updates at each time, whether these are
in its trace or unsealed, page by page; a stream that no page can sum is refused."""

import random
from collections import Counter
from typing import Any

import pytest

import aiopersist as ap
from tests.web.kit import links, pages, words
from tests.web.test_contents import all_rows, rows_of

Row = tuple[str, int, int, int]


async def fill(client: ap.Client, seed: int) -> list[Row]:
    """A stream `placed` with updates in any order, a part of them sealed, drained and merged."""
    rng, written = random.Random(seed), list[Row]()
    async with client.indexed("orders", background=False) as ix:
        placed = await ix.register("placed", str, int)
        await ix.register("paid", str, int)
        for seal in (0, 5, 9):
            updates = [
                (
                    f"k{rng.randint(0, 90):02}",
                    rng.randint(0, 2),
                    rng.randint(seal, 20),
                    rng.choice((1, 1, -1)),
                )
                for _ in range(200)
            ]
            await ix.write([(placed, updates)])
            written += updates
            if seal:
                await ix.step()
            await ix.seal([placed], max(seal, 5))
        view = await ix.inspect(placed)
        assert view.trace
        assert view.unsealed
    return written


def sums(updates: list[Row], after: int, as_of: int) -> list[tuple[int, list[str]]]:
    found: Counter[tuple[str, int]] = Counter()
    for key, val, time, diff in updates:
        found[key, val] += diff * (after < time <= as_of)
    return [(diff, [key, str(val)]) for (key, val), diff in sorted(found.items()) if diff]


async def test_updates_that_are_in_the_trace_and_still_unsealed_count_once(
    mem: ap.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiopersist.indexed.arrangement.to_trim", lambda arrangement: None)
    written = await fill(mem, 5)
    async with pages(mem) as http:
        for time in (4, 6, 8, 20):
            assert await all_rows(http, name="orders", stream="placed", at=time) == sums(written, -1, time)


@pytest.mark.parametrize("readonly", [False, True])
async def test_all_pages_together_are_the_sum_of_the_updates(location: Any, readonly: bool) -> None:
    given = {"blob": location.blob, "consensus": location.consensus}
    async with ap.open(**given, maintenance=False) as client:
        written = await fill(client, 7)
        async with ap.open(**given, readonly=readonly, maintenance=False) as reader, pages(reader) as http:
            query = {"name": "orders", "stream": "placed"}
            for time in (0, 4, 5, 8, 9, 14, 20):
                assert await all_rows(http, **query, at=time) == sums(written, -1, time)
            assert await all_rows(http, **query) == sums(written, -1, 20)
            for after, time in ((0, 20), (4, 9), (8, 14), (12, 13)):
                found = await all_rows(http, **query, changes=1, since=after, at=time)
                assert found == sums(written, after, time)


async def test_a_stream_is_chosen_on_the_page_of_its_indexed(mem: ap.Client) -> None:
    written = await fill(mem, 3)
    async with pages(mem) as http:
        shard = await http.get("/shard?name=orders")
        placed, paid = sorted((link for link in links(shard) if "stream=" in link), reverse=True)
        found = await http.get(f"/{placed}")
        assert "stream placed" in words(found)
        assert "Times before 9 are sealed; later ones may still get updates." in words(found)
        assert rows_of(found) == sums(written, -1, 20)[:50]
        assert "sealed" not in words(await http.get(f"/{placed}&at=8"))
        assert "No rows." in words(await http.get(f"/{paid}"))
        assert "No time is sealed" in words(await http.get(f"/{paid}"))
        by_key = await all_rows(http, name="orders", stream="placed", how="from", key="k80", where="val > 0")
        assert by_key == [row for row in sums(written, -1, 20) if row[1][0] >= "k80" and row[1][1] != "0"]


async def test_a_long_value_of_a_stream_is_sent_whole(mem: ap.Client) -> None:
    async with mem.indexed("logs") as ix, pages(mem) as http:
        lines = await ix.register("lines", str, str)
        await ix.write([(lines, [("k", "x" * 5000, 3, 1)])])
        page = await http.get("/contents?name=logs&stream=lines")
        (value,) = (link for link in links(page) if link.startswith("value?"))
        assert (await http.get(f"/{value}")).text == "x" * 5000


async def test_what_has_no_pages_is_refused(mem: ap.Client) -> None:
    await fill(mem, 1)
    await mem.table("stock", str, int).put("a", 1)
    async with pages(mem) as http:
        for query, said in (
            ("name=orders", "stream='': its streams are 'paid', 'placed'"),
            ("name=orders&stream=lost", "stream='lost'"),
            ("name=stock&stream=placed", "its streams are none"),
            ("name=orders&stream=placed&at=x", "'x' is no time"),
        ):
            page = await http.get(f"/contents?{query}")
            assert page.status_code == 400
            assert said in words(page)
        assert (await http.get("/live?name=orders")).status_code == 400


async def test_a_stream_that_is_too_large_is_refused() -> None:
    settings = ap.Settings(read_memory_bytes=4000)
    async with ap.open("mem://", settings=settings) as client, client.indexed("logs") as ix:
        lines = await ix.register("lines", str, int)
        async with pages(client) as http:
            for number, said in ((3, "As of 0"), (300, "and pages sum at most 1,000 B in memory")):
                await ix.write([(lines, [(f"k{n}", n, 0, 1) for n in range(number)])])
                assert said in words(await http.get("/contents?name=logs&stream=lines"))
