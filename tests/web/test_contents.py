"""Goal: the pages of contents, one after the other, are the contents at that time, or what changed between
two times; filters, columns and values whole are those of the rows."""

import html
import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

import aiopersist as ap
from aiopersist.base.frontier import Antichain
from aiopersist.web.readable import STEPS, Scale
from aiopersist.web.reading import RowPlace
from aiopersist.web.rows import KeyBounds, last_needed
from tests.web.kit import links, pages, words

STRINGS = ap.Schema(str, int)


class Item(BaseModel, frozen=True):
    title: str
    price: float | None = None


Row = tuple[int | None, list[str]]


def rows_of(page: httpx.Response) -> list[Row]:
    """The diff, if it is shown, and the cells of each row."""
    assert page.status_code == 200, words(page)
    found = []
    for row in re.findall(r"<tr[^>]*>\s*<td class=\"n quiet\">.*?</tr>", page.text, re.DOTALL):
        diff = re.search(r'<td class="n diff">([+-]\d+)</td>', row)
        cells = [html.unescape(cell) for cell in re.findall(r"<bdi>(.*?)</bdi>", row, re.DOTALL)]
        found.append((int(diff[1]) if diff else None, cells))
    return found


async def all_rows(http: httpx.AsyncClient, **query: Any) -> list[Row]:
    """The rows of all pages."""
    page = await http.get("/contents", params=query)
    found = rows_of(page)
    while following := [link for link in links(page) if "after=" in link and 'rel="next"' in page.text]:
        page = await http.get(f"/{following[-1]}")
        found += rows_of(page)
    return found


async def test_all_pages_together_are_the_contents_at_each_time(location: Any) -> None:
    async with ap.open(blob=location.blob, consensus=location.consensus, maintenance=False) as client:
        async with client.writer("orders", STRINGS) as writer:
            for time in range(4):
                rows = [(f"k{n % 170:03}", n % 3, time, 1 - 2 * (n % 7 == time)) for n in range(200)]
                await writer.compare_and_append(rows, time, time + 1)
        async with pages(client) as http, client.reader("orders") as reader:
            for time in (0, 2, 3):
                async with reader.snapshot(time) as snapshot:
                    wanted = [(diff, [key, str(val)]) for key, val, diff in await snapshot.rows()]
                assert await all_rows(http, name="orders", at=time) == wanted
            assert await all_rows(http, name="orders") == wanted
            async with reader.snapshot(1) as before, reader.snapshot(2) as behind:
                sums = Counter({(key, val): diff for key, val, diff in await behind.rows()})
                sums.subtract({(key, val): diff for key, val, diff in await before.rows()})
            changed = [(diff, [key, str(val)]) for (key, val), diff in sorted(sums.items()) if diff]
            assert await all_rows(http, name="orders", at=2, since=1, changes=1) == changed


def way(page: httpx.Response, rel: str) -> str | None:
    """Where the link of a page leads, if there is one: `next` or `prev`."""
    found = re.search(rf'<a rel="{rel}" href="([^"]*)"', page.text)
    return f"/{html.unescape(found[1])}" if found else None


async def test_pages_go_back_as_they_came(mem: ap.Client) -> None:
    stock = mem.table("stock", str, int)
    await stock.put_many({f"{'k' * 90}{n:04}": n for n in range(1810)})
    seen = []
    async with pages(mem) as http:
        page = await http.get("/contents?name=stock&how=from&key=k")
        assert way(page, "prev") is None
        while following := way(page, "next"):
            seen.append(rows_of(page))
            page = await http.get(following)
            assert len(following) < 5000
        back = 0
        while before := way(page, "prev"):
            page = await http.get(before)
            back += 1
            assert rows_of(page) == seen[-back]
        assert back >= 15  # with keys of 94 characters; the first pages went from the address
        assert "First rows" in words(page)
        assert way(page, "next")
        assert (await http.get("/contents?name=stock&before=garbage")).status_code == 400


async def test_a_short_way_leads_back_to_the_first_page(mem: ap.Client) -> None:
    await mem.table("stock", int, int).put_many({n: n for n in range(120)})
    async with pages(mem) as http:
        first = page = await http.get("/contents?name=stock")
        for rel in ("next", "next", "prev", "next", "prev", "prev"):
            address = way(page, rel)
            assert address
            page = await http.get(address)
        assert rows_of(page) == rows_of(first)
        assert way(page, "prev") is None


async def test_many_vals_of_a_key_are_shown_once_each(mem: ap.Client) -> None:
    async with mem.writer("orders", STRINGS) as writer:
        await writer.compare_and_append([("same", n, 0, 1) for n in range(120)] + [("z", 1, 0, 1)], 0, 1)
    async with pages(mem) as http:
        found = await all_rows(http, name="orders")
    assert found == [*((1, ["same", str(n)]) for n in range(120)), (1, ["z", "1"])]


async def test_rows_that_cancel_make_no_page_short(quiet_mem: ap.Client) -> None:
    async with quiet_mem.writer("orders", STRINGS) as writer:
        for at in range(3):  # each a part of its own keys
            rows = [(f"k{n:05}", 1, at, 1) for n in range(at * 1000, at * 1000 + 1000)]
            await writer.compare_and_append(rows, at, at + 1)
        gone = [(f"k{n:05}", 1, 3, -1) for n in range(2960)]
        await writer.compare_and_append(gone, 3, 4)
    async with pages(quiet_mem) as http:
        assert [cells[0] for _, cells in await all_rows(http, name="orders")] == [
            f"k{n:05}" for n in range(2960, 3000)
        ]


async def test_what_changed_between_two_times(quiet_mem: ap.Client) -> None:
    stock = quiet_mem.table("stock", str, int)
    first = await stock.put_many({"a": 1, "b": 1, "c": 1})
    second = await stock.put("b", 2)
    third = await stock.delete("c")
    query = {"name": "stock", "changes": "1", "since": str(first)}
    async with pages(quiet_mem) as http:
        found = await all_rows(http, **query, at=str(third))
        assert found == [(-1, ["b", "1"]), (1, ["b", "2"]), (-1, ["c", "1"])]
        assert await all_rows(http, **query, at=str(second)) == [(-1, ["b", "1"]), (1, ["b", "2"])]
        assert await all_rows(http, **query, at=str(first)) == []
        backwards = {"name": "stock", "changes": "1", "since": str(third), "at": str(first)}
        assert await all_rows(http, **backwards) == found


async def test_keys_from_one_on_equal_to_one_and_by_their_beginning(mem: ap.Client) -> None:
    stock = mem.table("stock", str, int)
    await stock.put_many({f"{letter}{n}": n for letter in "abc" for n in range(40)})
    async with pages(mem) as http:
        by_prefix = await all_rows(http, name="stock", how="prefix", key="b1")
        assert [cells[0] for _, cells in by_prefix] == ["b1", *(f"b1{n}" for n in range(10))]
        assert await all_rows(http, name="stock", how="is", key="b7") == [(None, ["b7", "7"])]
        assert len(await all_rows(http, name="stock", how="from", key="b")) == 80
        assert await all_rows(http, name="stock", how="is", key="none") == []


async def test_rows_that_fulfil_a_condition(mem: ap.Client) -> None:
    """Goal: a condition, alone and beside keys, page by page and in what changed; a text that is none is
    refused, and shows no page."""
    stock = mem.table("stock", str, int)
    first = await stock.put_many({f"item {n:03}": n % 4 for n in range(300)})
    second = await stock.put_many({"item 003": 7, "item 004": 7})
    async with pages(mem) as http:
        odd = await all_rows(http, name="stock", at=first, where="val = 3")
        assert [cells[0] for _, cells in odd] == [f"item {n:03}" for n in range(300) if n % 4 == 3]
        some = await all_rows(http, name="stock", how="prefix", key="item 00", where="val in (3, 7)")
        assert [cells for _, cells in some] == [["item 003", "7"], ["item 004", "7"], ["item 007", "3"]]
        changed = await all_rows(http, name="stock", changes=1, since=first, at=second, where="val < 7")
        assert changed == [(-1, ["item 003", "3"]), (-1, ["item 004", "0"])]
        for bad in ("val =", "none > 3", "<script>"):
            refused = await http.get("/contents", params={"name": "stock", "where": bad})
            assert refused.status_code == 400
            assert "<script>" not in refused.text


async def test_keys_of_all_types(mem: ap.Client) -> None:
    for name, key_type, keys, given in [
        ("ints", int, [-5, 3, 200], "3"),
        ("bytes", bytes, [b"\x00", b"\xff\x01", b"\xff\x02"], "0xff01"),
        (
            "pairs",
            Item,
            [Item(title="a", price=1.5), Item(title="b"), Item(title="c")],
            '{"title": "b", "price": null}',
        ),
    ]:
        async with mem.writer(name, ap.Schema(key_type, int)) as writer:
            await writer.compare_and_append([(key, n, 0, 1) for n, key in enumerate(keys)], 0, 1)
        async with pages(mem) as http:
            assert [cells[-1] for _, cells in await all_rows(http, name=name)] == ["0", "1", "2"]
            assert [cells[-1] for _, cells in await all_rows(http, name=name, how="is", key=given)] == ["1"]
            assert len(await all_rows(http, name=name, how="from", key=given)) == 2
            refused = await http.get("/contents", params={"name": name, "how": "is", "key": "no such [key"})
            assert refused.status_code == (200 if name == "bytes" else 400)


async def test_columns_are_those_of_the_rows_or_the_chosen_ones(mem: ap.Client) -> None:
    await mem.table("stock", str, Item).put("pen", Item(title="Pen", price=None))
    async with pages(mem) as http:
        assert await all_rows(http, name="stock") == [(None, ["pen", "Pen", "null"])]
        assert await all_rows(http, name="stock", column=["key", "val.price"]) == [(None, ["pen", "null"])]


async def test_values_that_are_cut_lead_to_the_whole(mem: ap.Client) -> None:
    long = "é<" * 400_000
    data = bytes(range(256)) * 10
    schema = ap.Schema(str, bytes)
    await mem.table("texts", str, str).put_many({"a": "short", "b": long})
    async with mem.writer("data", schema) as writer:
        await writer.compare_and_append([("x", data, 0, 1)], 0, 1)
    async with pages(mem) as http:
        page = await http.get("/contents?name=texts")
        assert len(page.content) < 20_000
        (more,) = (link for link in links(page) if link.startswith("value?"))
        whole = await http.get(f"/{more}")
        assert whole.text == long
        assert whole.headers["content-type"] == "text/plain; charset=utf-8"
        (more,) = (link for link in links(await http.get("/contents?name=data")) if link.startswith("value?"))
        whole = await http.get(f"/{more}")
        assert whole.content == data
        assert whole.headers["content-disposition"].startswith("attachment")
        assert (await http.get("/value?name=texts&row=7&of=val")).status_code == 400
        assert (await http.get("/value?name=texts&row=0&of=nothing")).status_code == 400


@pytest.mark.parametrize(
    ("query", "status", "said"),
    [
        ({"at": "7"}, 425, "as_of 7 is not complete"),
        ({"at": "1"}, 410, "as_of 1 is not at or beyond since {2}"),
        ({"at": "soon"}, 400, "'soon' is no time of this shard"),
        ({"at": "-3"}, 400, "'-3' is no time"),
        ({"at": "1,2"}, 400, "'1,2' is no time"),
        ({"at": "2026-01-31 12:00"}, 400, "no time of this shard: write an int"),
        ({"after": "garbage"}, 400, "after='garbage' is no place"),
        ({"how": "like", "key": "x"}, 400, "how='like': one of from"),
    ],
)
async def test_what_cannot_be_read_is_said(
    mem: ap.Client, query: dict[str, str], status: int, said: str
) -> None:
    async with mem.writer("orders", STRINGS) as writer, mem.reader("orders") as reader:
        await writer.compare_and_append([("a", 1, 0, 1)], 0, 5)
        await reader.downgrade_since(2)
        async with pages(mem) as http:
            page = await http.get("/contents", params={"name": "orders", **query})
    assert page.status_code == status
    assert said in words(page)


async def test_a_new_shard_has_no_contents_yet(mem: ap.Client) -> None:
    async with mem.writer("new", STRINGS), pages(mem) as http:
        assert "Nothing was appended yet" in words(await http.get("/contents?name=new"))


async def test_contents_at_product_times(mem: ap.Client) -> None:
    async with mem.writer("pairs", ap.Schema(str, int, time=2)) as writer, pages(mem) as http:
        assert "Nothing was appended yet" in words(await http.get("/contents?name=pairs"))
        zero, two = Antichain((0, 0)), Antichain((2, 0), (0, 5))
        await writer.compare_and_append([("a", 1, (1, 2), 1), ("b", 1, (0, 4), 1)], zero, two)
        first = await http.get("/contents?name=pairs")
        assert "As of (1, 4)" in words(first)
        assert rows_of(first) == [(1, ["a", "1"]), (1, ["b", "1"])]
        assert rows_of(await http.get("/contents?name=pairs&at=1,2")) == [(1, ["a", "1"])]
        await writer.compare_and_append([("a", 1, (2, 2), -1)], two, Antichain((3, 6)))
        changes = "/contents?name=pairs&changes=1"
        assert rows_of(await http.get(f"{changes}&at=2,4&since=1,2")) == [(-1, ["a", "1"]), (1, ["b", "1"])]
        assert rows_of(await http.get(f"{changes}&at=1,2&since=2,4")) == [(-1, ["a", "1"]), (1, ["b", "1"])]
        for query, said in (
            ("&changes=1&at=2,1&since=1,2", "(1, 2) and (2, 1) have no order"),
            ("&at=7", "ints with commas between them"),
            ("&at=1,2,3", "(1, 2, 3) is not of the shape"),
        ):
            refused = await http.get(f"/contents?name=pairs{query}")
            assert refused.status_code == 400
            assert said in words(refused)
        assert "Live changes" not in words(first)
        assert (await http.get("/shard?name=pairs")).status_code == 200


async def test_a_closed_shard_of_product_times_has_its_last_contents(mem: ap.Client) -> None:
    async with mem.writer("pairs", ap.Schema(str, int, time=2)) as writer, pages(mem) as http:
        await writer.compare_and_append([("a", 1, (1, 2), 1)], Antichain((0, 0)), Antichain((2, 3)))
        await writer.compare_and_append([], Antichain((2, 3)), Antichain())
        assert rows_of(await http.get("/contents?name=pairs")) == [(1, ["a", "1"])]


# --- the slider ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scale", [Scale(0, 0), Scale(3, 10), Scale(0, STEPS), Scale(5, 10**15), Scale(0, 2**62)]
)
def test_a_position_of_the_slider_is_a_time_and_back(scale: Scale) -> None:
    assert scale.time(0) == scale.first
    assert scale.time(scale.steps) == scale.last
    for step in range(0, scale.steps + 1, 37):
        assert scale.step(scale.time(step)) == step
    assert scale.step(scale.first - 5) == 0
    assert scale.step(scale.last + 5) == scale.steps


async def test_the_slider_counts_once_it_was_moved(mem: ap.Client) -> None:
    async with mem.writer("orders", STRINGS) as writer:
        for time in range(10):
            await writer.compare_and_append([(f"k{time}", 1, time, 1)], time, time + 1)
    query = {"name": "orders", "at": "3", "at_was": "3"}
    async with pages(mem) as http:
        assert len(await all_rows(http, **query, at_step="3")) == 4
        assert len(await all_rows(http, **query, at_step="6")) == 7
        assert len(await all_rows(http, **query, at_step="9")) == 10
        assert len(await all_rows(http, **query)) == 4


# --- which parts are read -----------------------------------------------------------------------------------


def test_parts_beyond_enough_rows_are_not_needed() -> None:
    parts = [KeyBounds(n * 10, n * 10 + 9, 100) for n in range(20)]
    assert last_needed(parts, None, 50) == 9
    assert last_needed(parts, None, 101) == 19
    assert last_needed(parts, 55, 50) == 69  # the part that begins before the start may have none behind it
    assert last_needed(parts, None, 10_000) is None
    assert last_needed([*parts, KeyBounds(None, None, 5)], None, 50) == 9
    assert last_needed([KeyBounds(None, None, 500)], None, 50) is None


async def test_a_page_reads_the_parts_that_it_needs(tmp_path: Any) -> None:
    async with ap.open(tmp_path, maintenance=False) as client:
        async with client.writer("orders", ap.Schema(int, str)) as writer:
            for at in range(30):
                rows = [(at * 1000 + n, "x" * 40, at, 1) for n in range(1000)]
                await writer.compare_and_append(rows, at, at + 1)
        async with pages(client) as http:

            def gets() -> int:
                return client.metrics["blob.get"].count + client.metrics["blob.get_range"].count

            for query, most in [
                ({}, 2),
                ({"how": "from", "key": "15000"}, 2),
                ({"changes": "1", "since": "27"}, 2),
            ]:
                before = gets()
                page = await http.get("/contents", params={"name": "orders", **query})
                assert len(rows_of(page)) == 50
                assert gets() - before <= most


ODD_KEYS = ["NaN", "1e999", "[1]", "{}", '{"x":1}', "true", "1,2", "", "null,null", '"x"', '"eA=="', "-1"]
ODD_KEYS += ["9" * 400, "[" * 5000]


@pytest.mark.parametrize("key", [str, bytes, int, float, Decimal, datetime])
async def test_a_place_at_no_key_of_the_shard_is_refused(mem: ap.Client, key: type) -> None:
    """Goal: whatever an address says of its place, it is a page, or a refusal that names the place."""
    schema = ap.Schema(key, int)
    async with mem.writer("s", schema) as writer:
        await writer.compare_and_append([], 0, 1)
    seen = set()
    async with pages(mem) as http:
        for text in ODD_KEYS:
            query = {"name": "s", "after": RowPlace(text, 1, 1).text}
            for address in ("/contents", "/value"):
                page = await http.get(address, params=query)
                seen.add(page.status_code)
                assert page.status_code == 200 or "after=" in words(page) or "no such value" in words(page)
    assert seen == {200, 400}


async def test_an_instant_that_has_passed_at_rest(mem: ap.Client) -> None:
    """Goal: nobody has written since the last commit, so its contents are those of then; the page says so,
    and appends nothing."""
    last = await mem.table("t", str, int).put("a", 1)
    now = datetime.now(UTC)
    async with pages(mem) as http:
        for query in ({"at": now.isoformat()}, {"at": "now-0s"}, {"at": str(last + 1)}):
            page = await http.get("/contents", params={"name": "t", **query})
            assert rows_of(page) == [(None, ["a", "1"])]
            assert "Nobody has written since," in words(page)
        page = await http.get("/contents", params={"name": "t", "changes": "1", "since": "now-0s"})
        assert "Nothing changed" in words(page)
        page = await http.get("/contents", params={"name": "t", "at": str(last)})
        assert "Nobody has written since," not in words(page)
        later = (now + timedelta(days=1)).isoformat()
        assert (await http.get("/contents", params={"name": "t", "at": later})).status_code == 425
    assert await mem.upper("t") == Antichain(last + 1)
