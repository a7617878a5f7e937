"""Goal: the pages show the tags of a shard and what each keeps, whatever has become of the history; with
`write=True` they add and drop them."""

import html
import re
from typing import Any
from urllib.parse import urlencode

import aiopersist as ap
from tests.web.kit import links, pages, words
from tests.web.test_contents import all_rows, rows_of
from tests.web.test_work import outcome

STRINGS = ap.Schema(str, int)
HOSTILE = "\u202e<script>alert(1)</script>&a=b"


async def tagged(client: ap.Client) -> list[Any]:
    """A shard whose history is gone but for a tag; returns the rows that this keeps, as pages show them."""
    async with client.writer("orders", STRINGS) as writer:
        await writer.compare_and_append([(f"k{n:03}", n, 0, 1) for n in range(120)], 0, 1)
        await client.tag("orders", HOSTILE, 0)
        await writer.compare_and_append([(f"k{n:03}", n, 1, -1) for n in range(119)], 1, 2)
    await advance(client, "orders")
    return [(1, [f"k{n:03}", str(n)]) for n in range(120)]


async def advance(client: ap.Client, shard: str) -> None:
    """Give up the history before the newest time."""
    await client.admin.retain(shard, 0)
    await client.admin.force_compaction(shard)
    await client.admin.force_gc(shard)


async def test_contents_of_a_tag(quiet_mem: ap.Client) -> None:
    rows = await tagged(quiet_mem)
    async with pages(quiet_mem) as http:
        assert (await http.get("/contents?name=orders&at=0")).status_code == 410
        assert len(await all_rows(http, name="orders")) == 1
        assert await all_rows(http, name="orders", tag=HOSTILE) == rows
        assert await all_rows(http, name="orders", tag=HOSTILE, how="is", key="k007") == [rows[7]]
        page = await http.get("/contents", params={"name": "orders", "tag": HOSTILE, "where": "val > 117"})
        assert rows_of(page) == rows[118:]
        assert "<script>alert" not in page.text and "As of 0" in words(page)
        hidden = re.findall(r'type="hidden" name="tag" value="([^"]*)"', page.text)
        assert list(map(html.unescape, hidden)) == [HOSTILE]
        assert 'type="range"' not in page.text and "data-stream" not in page.text


async def test_long_values_of_a_tag(quiet_mem: ap.Client) -> None:
    """Goal: the whole value is the tag's, not the newest one."""
    async with quiet_mem.writer("texts", ap.Schema(str, str)) as writer:
        await writer.compare_and_append([("a", "old" * 300, 0, 1)], 0, 1)
        await quiet_mem.tag("texts", "monday")
        await writer.compare_and_append([("a", "old" * 300, 1, -1), ("a", "new" * 300, 1, 1)], 1, 2)
    await advance(quiet_mem, "texts")
    async with pages(quiet_mem) as http:
        page = await http.get("/contents?name=texts&tag=monday")
        (more,) = (link for link in links(page) if link.startswith("value?"))
        assert (await http.get(f"/{more}")).text == "old" * 300


async def test_the_page_of_a_shard_lists_its_tags(quiet_mem: ap.Client) -> None:
    await tagged(quiet_mem)
    async with pages(quiet_mem) as http:
        page = await http.get("/shard?name=orders")
        assert f"contents?{urlencode({'name': 'orders', 'tag': HOSTILE})}" in links(page)
        assert re.search(
            r"Name Contents at Added Expires Parts Bytes \S+script\S+ 0 \S.* never \d+ ", words(page)
        )
        assert "<script>alert" not in page.text and 'action="do"' not in page.text


async def test_what_cannot_be_read(quiet_mem: ap.Client) -> None:
    await tagged(quiet_mem)
    async with pages(quiet_mem) as http:
        absent = await http.get("/contents?name=orders&tag=nothing")
        assert absent.status_code == 404 and "there is no tag 'nothing'" in words(absent)
        for query in ("at=1", "changes=1&since=0"):
            both = await http.get(f"/contents?name=orders&tag=x&{query}")
            assert both.status_code == 400 and "a tag or a time, not both" in words(both)


async def test_tags_are_added_and_dropped(quiet_mem: ap.Client) -> None:
    await tagged(quiet_mem)
    async with pages(quiet_mem, write=True) as http:
        done = await outcome(http, action="tag", tag="noon", days="30")
        assert "'noon' keeps the newest contents" in done and "in 30 d" in done
        assert "TagExists" in await outcome(http, action="tag", tag="noon", days="")
        noon = (await quiet_mem.tags("orders"))["noon"]
        assert noon.expires_at is not None and noon.as_of == 1
        assert "is dropped" in await outcome(http, action="untag", tag=HOSTILE)
        assert "UnknownTag" in await outcome(http, action="untag", tag=HOSTILE)
        assert list(await quiet_mem.tags("orders")) == ["noon"]
        assert "INVALID_NAME" in await outcome(http, action="tag", tag="", days="")
