"""Goal: each page says what the location has, at the moment at which it is asked for; addresses with mistakes
are refused, and what is refused is named."""

import asyncio
import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

import aiopersist as ap
from aiopersist.maintenance.overview import ShardSummary
from aiopersist.state.model import Clock
from aiopersist.web.census import Speed
from aiopersist.web.location import growth
from tests.support.shards import comes_to_rest
from tests.web.kit import links, pages, words

STRINGS = ap.Schema(str, int)
HOSTILE = "<script>alert(1)</script>\u202e\"'&\t\x1b[31m"


async def write(client: ap.Client, name: str, *times: int) -> None:
    async with client.writer(name, STRINGS) as writer:
        for time in times:
            await writer.compare_and_append([(f"k{time}", 1, time, 1)], time, time + 1)


async def test_the_list_has_all_shards_with_their_figures(mem: ap.Client) -> None:
    await write(mem, "orders", 0, 1, 2)
    await mem.table("stock", str, int).put("pen", 3)
    async with mem.indexed("streams"):
        pass
    async with pages(mem) as http:
        said = words(await http.get("/"))
    assert re.search(r"orders 0 3 3 3 [\d.,]+ \w+", said)
    assert "stock table the beginning 20" in said
    assert "streams indexed" in said
    assert "by now" not in said


async def test_the_list_is_of_now(mem: ap.Client) -> None:
    async with pages(mem) as http:
        assert "There are no shards yet." in words(await http.get("/"))
        await write(mem, "orders", 0)
        assert "orders 0 1 1 1" in words(await http.get("/"))
        await write(mem, "orders", 1)
        assert "orders 0 2 2 2" in words(await http.get("/"))
        await mem.drop("orders")
        assert "There are no shards yet." in words(await http.get("/"))


async def test_search_sort_and_pages(mem: ap.Client) -> None:
    for number in range(60):
        await write(mem, f"s{number:02}", *range(1 + number % 3))
    async with pages(mem) as http:
        first, second = await http.get("/"), await http.get("/?page=2")
        assert "s00" in first.text
        assert "s59" not in first.text
        assert "s59" in second.text
        assert "Page 2 of 2" in words(await http.get("/?page=999"))
        by_updates = await http.get("/?sort=updates&q=S1")
        names = re.findall(r"<bdi>(s\d+)</bdi>", by_updates.text)
        assert names == ["s11", "s14", "s17", "s10", "s13", "s16", "s19", "s12", "s15", "s18"]
        assert "No name contains" in words(await http.get("/", params={"q": HOSTILE}))


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("/?sort=colour", "sort='colour': one of name"),
        ("/?page=0", "page='0': a number from 1 on"),
        ("/?page=-1", "page='-1'"),
        ("/?page=\u0663", "page="),
        ("/shard?name=orders&window=3", "window='3': two numbers"),
        ("/shard?name=orders&batches=a-b", "batches='a-b'"),
        ("/shard?name=orders&window=9-3", "window='9-3'"),
    ],
)
async def test_a_mistake_in_an_address_is_named(mem: ap.Client, address: str, said: str) -> None:
    await write(mem, "orders", 0)
    async with pages(mem) as http:
        page = await http.get(address)
    assert page.status_code == 400
    assert said in words(page)


async def test_what_is_not_there_is_said(mem: ap.Client) -> None:
    async with pages(mem) as http:
        page = await http.get("/shard", params={"name": HOSTILE})
        assert page.status_code == 404
        assert "<script>alert" not in page.text
        assert (await http.get("/shard")).status_code == 400
        assert (await http.get("/nowhere")).status_code == 404


async def test_a_shard_says_who_holds_its_history(mem: ap.Client) -> None:
    await write(mem, "orders", *range(8))
    await mem.retain("orders", 5)
    async with (
        await mem.critical_since("orders", "billing"),
        mem.reader("orders", hold=3, hold_name="report"),
        mem.subscription("orders", name="search", start="now"),
        pages(mem) as http,
    ):
        page = await http.get("/shard", params={"name": "orders"})
    said = words(page)
    owner = r"\S+:\d+"
    assert re.search(r"critical billing none 0 8 yes only by critical_since", said)
    assert re.search(rf"named report {owner} 3 5 no when its owner", said)
    assert re.search(rf"search 8 0 0 0 B {owner} \w+", said)
    assert re.search(rf"named hold report {owner} 3 \S 15 min 15 min", said)
    assert "Since stays at 0 because of the critical since billing." in said
    assert "Retention the last 5 times" in said
    assert re.search(r"batch(es)? on \d+ levels?, since 0, upper 8", said)


async def test_a_shard_says_who_keeps_its_old_versions(mem: ap.Client) -> None:
    await write(mem, "orders", 0)
    async with mem.reader("orders") as reader, reader.snapshot(0), pages(mem) as http:
        await write(mem, "orders", 1, 2, 3)
        said = words(await http.get("/shard?name=orders"))
        since = "No hold keeps since from moving, and nothing moves it" in said
        found = re.search(r"reader r\w{8} of (\S+:\d+) keeps the last (\d+) with their blobs", said)
        assert found
        assert re.search(rf"reader r\w{{8}} {found[1]} \S+ {found[2]} 15 min 15 min", said)
        assert since or "by the reader r" in said
    assert 3 <= int(found[2]) <= 8


async def test_the_pages_of_a_client_that_commits_say_what_its_commits_wait_for(mem: ap.Client) -> None:
    async with pages(mem) as http:
        assert "This client made no commits" in words(await http.get("/"))
        await write(mem, "orders", 0, 1)
        said = words(await http.get("/"))
    assert re.search(r"Total \S+ \S+ on average, half within \S+ \S+, 99 % within", said)
    assert re.search(r"The store \S+ \S+ the mean time to write a version: \d+% of", said)
    assert re.search(r"Lost races 0 0.0% of commits", said)
    assert re.search(r"Cache \S+ of \d+ reads? of blobs", said)


async def test_the_list_says_which_shards_grow(mem: ap.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiopersist.web.census.PASS_EVERY_S", 0.01)
    monkeypatch.setattr("aiopersist.web.census.GROWTH_MIN_S", 1.0)
    await write(mem, "calm", 0)
    await write(mem, "orders", 0)
    async with pages(mem) as http:
        await http.get("/")
        await write(mem, "orders", *range(1, 30))
        while not re.search(
            r"orders 0 30 .* \+\S+ \w+ /min .* calm 0 1", words(page := await http.get("/?sort=growth"))
        ):
            await asyncio.sleep(0.1)
    assert page.text.index(">orders<") < page.text.index(">calm<")


async def test_a_box_leads_to_the_parts_and_statistics_of_its_batch(quiet_mem: ap.Client) -> None:
    async with quiet_mem.writer("orders", STRINGS) as writer:
        for time in range(3):  # so many rows are no inline part
            rows = [(f"k{time}-{n:04}", n, time, 1) for n in range(3000)]
            await writer.compare_and_append(rows, time, time + 1)
    async with pages(quiet_mem) as http:
        picture = await http.get("/shard?name=orders")
        boxes = [link for link in links(picture) if "batches=" in link][:3]
        said = words(await http.get(f"/{boxes[1]}"))
        assert "key k1-0000 k1-2999 0" in said
        assert "key k0-0000" not in said
        first, last = boxes[0].partition("batches=")[2][0], boxes[2].partition("batches=")[2][0]
        several = await http.get(f"/shard?name=orders&batches={first}-{last}")
        assert {*boxes} < {*links(several)}
        assert "This batch no longer exists" in words(await http.get("/shard?name=orders&batches=70-90"))


async def test_an_indexed_has_a_page(mem: ap.Client) -> None:
    async with mem.indexed("streams") as ix, pages(mem) as http:
        await ix.register("orders", str, int)
        page = await http.get("/shard?name=streams")
    assert page.status_code == 200
    assert "orders" in words(page)


async def test_usage_is_counted_on_demand(mem: ap.Client) -> None:
    await write(mem, "orders", 0)
    async with pages(mem) as http:
        assert "Not counted yet" in words(await http.get("/"))
        assert (await http.post("/usage")).status_code == 303
        while "Counted 20" not in (said := words(await http.get("/"))):
            await asyncio.sleep(0.01)
    assert "referenced" in said


async def test_metrics_are_there_for_prometheus(mem: ap.Client) -> None:
    await write(mem, "orders", 0)
    async with pages(mem) as http:
        said = words(await http.get("/"))
        answer = await http.get("/metrics")
    assert re.search(r"consensus compare and set \d+ 0 ", said)
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert any("commit" in name for name in families)


async def test_names_are_shown_and_lead_to_their_pages_whatever_they_are(mem: ap.Client) -> None:
    names = [HOSTILE, "a/../b", "?q=1#x", "%2e%2e", "שלום", "x" * 500]
    for name in names:
        await write(mem, name, 0)
    async with pages(mem) as http:
        first = await http.get("/")
        assert "<script>alert" not in first.text
        assert "\x1b" not in first.text
        assert "\u202e" not in first.text
        found = [link for link in links(first) if link.startswith("shard?")]
        assert len(found) == len(names)
        for link in found:
            page = await http.get(f"/{link}")
            assert page.status_code == 200
            assert "<script>alert" not in page.text


async def test_an_inspector_that_nobody_looks_at_reads_nothing(
    mem: ap.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiopersist.web.census.CONTINUE_S", 0.05)
    monkeypatch.setattr("aiopersist.web.census.PASS_EVERY_S", 0.01)
    await write(mem, "orders", 0)
    async with pages(mem) as http:
        await http.get("/")
        await comes_to_rest(lambda: mem.metrics["consensus.heads"].count, 0.1)


def test_growth_is_that_of_the_last_minute() -> None:
    def summary(clock: Clock, bytes_per_s: float | None) -> ShardSummary:
        return ShardSummary(
            name="s", shard_id="s", kind="shard", clock=clock, written_at=100.0, bytes_per_s=bytes_per_s
        )

    wall, counted = summary(Clock.WALL, 7.0), summary(Clock.LOGICAL, None)
    assert growth(wall, Speed(1.0, -5.0), 130.0) == 7.0
    assert growth(wall, Speed(1.0, -5.0), 161.0) == 0.0
    assert growth(summary(Clock.WALL, None), Speed(1.0, 5.0), 130.0) is None
    assert growth(counted, Speed(1.0, 5.0), 130.0) == 5.0
    assert growth(counted, Speed(1.0, None), 130.0) is None
    assert growth(counted, None, 130.0) is None
