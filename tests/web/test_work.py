"""Goal: an inspector that may write does the work that its own forms ask for, and nothing for others."""

import asyncio
import re
from typing import Any

import httpx
import pytest

import aiopersist as ap
from tests.web.kit import pages, words

STRINGS = ap.Schema(str, int)
ORDERS = {"name": "orders"}


async def filled(client: ap.Client) -> None:
    async with client.writer("orders", STRINGS) as writer:
        for time in range(5):
            await writer.compare_and_append([("k", 1, time, 1)], time, time + 1)


async def secret_of(http: httpx.AsyncClient, name: str = "orders") -> str:
    found = re.search(r'name="form" value="(\w+)"', (await http.get("/shard", params={"name": name})).text)
    assert found
    return found[1]


async def outcome(http: httpx.AsyncClient, shard: str = "orders", **form: Any) -> str:
    """What the page says of the work, once it has ended."""
    query = {"name": shard}
    sent = await http.post("/do", data={**query, "form": await secret_of(http, shard), **form})
    assert sent.status_code == 303, words(sent)
    assert sent.headers["location"] == f"shard?name={shard}#work"
    while "running for" in (said := words(await http.get("/shard", params=query))):
        await asyncio.sleep(0.01)
    return said


async def test_each_piece_of_work_is_done_and_told(quiet_mem: ap.Client) -> None:
    await filled(quiet_mem)
    async with pages(quiet_mem, write=True) as http:
        assert "All data is intact: read 5 parts with 5 updates." in await outcome(http, action="fsck")
        assert "All batches were merged into one." in await outcome(http, action="compact")
        assert len((await quiet_mem.inspect("orders")).batches) == 1
        assert re.search(r"Deleted \d+ parts? and \d+ versions?", await outcome(http, action="gc"))
        assert "Maintenance keeps the last 7 d." in await outcome(
            http, action="retain", keep="7", unit="days"
        )
        retention = (await quiet_mem.inspect("orders")).retention
        assert retention is not None
        assert retention.seconds == 7 * 86_400
        assert "keeps all history" in await outcome(http, action="retain", keep="", unit="all")
        assert (await quiet_mem.inspect("orders")).retention is None


async def test_a_form_says_that_times_of_a_wall_clock_are_microseconds(quiet_mem: ap.Client) -> None:
    await filled(quiet_mem)
    await quiet_mem.table("stock", str, int).put("tea", 1)
    async with pages(quiet_mem, write=True) as http:
        for name, is_wall in (("stock", True), ("orders", False)):
            said = words(await http.get("/shard", params={"name": name}))
            assert ("times of history (microseconds: choose hours or days)" in said) is is_wall


async def test_an_indexed_is_checked(quiet_mem: ap.Client) -> None:
    """Goal: its page offers this work alone."""
    async with quiet_mem.indexed("ix") as ix:
        stream = await ix.register("s", str, int)
        await ix.write([(stream, [("k", 1, 0, 1)])])
    async with pages(quiet_mem, write=True) as http:
        page = (await http.get("/shard", params={"name": "ix"})).text
        assert re.findall(r'name="action" value="(\w+)"', page) == ["fsck"]
        assert "All data is intact: read 1 part with 1 update." in await outcome(http, "ix", action="fsck")
        assert "UnknownShard" in await outcome(http, "ix", action="compact")


@pytest.mark.parametrize("change", ["no cookie", "no field", "another field", "another site"])
async def test_a_form_of_another_site_is_refused(quiet_mem: ap.Client, change: str) -> None:
    await filled(quiet_mem)
    async with pages(quiet_mem, write=True) as http:
        form, headers = {**ORDERS, "action": "compact", "form": await secret_of(http)}, {}
        if change == "no cookie":
            http.cookies.clear()
        elif change == "no field":
            del form["form"]
        elif change == "another field":
            form["form"] = "0" * 32
        else:
            headers["Sec-Fetch-Site"] = "same-site"
        assert (await http.post("/do", data=form, headers=headers)).status_code == 403
        http.cookies.clear()
        assert (await http.post("/do", data={**form, "form": ""})).status_code == 403
    assert len((await quiet_mem.inspect("orders")).batches) == 5


OWN, OTHER_PORT = {"Origin": "http://localhost"}, {"Origin": "http://localhost:8080"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 303),  # a program
        (OWN, 303),
        (OTHER_PORT, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({**OTHER_PORT, "Sec-Fetch-Site": "same-origin"}, 303),  # a proxy has changed Host
        ({**OWN, "Sec-Fetch-Site": "cross-site"}, 403),
    ],
)
async def test_a_form_comes_from_these_pages(
    quiet_mem: ap.Client, headers: dict[str, str], status: int
) -> None:
    """Goal: plain HTTP beyond localhost, where browsers send no `Sec-Fetch-Site`."""
    await filled(quiet_mem)
    async with pages(quiet_mem, write=True) as http:
        form = {**ORDERS, "action": "compact", "form": await secret_of(http)}
        assert (await http.post("/do", data=form, headers=headers)).status_code == status
        assert (await http.post("/usage", headers=headers)).status_code == status


async def test_a_cookie_that_another_page_planted_opens_nothing(quiet_mem: ap.Client) -> None:
    """Goal: cookies know no ports, so a page of another one can set this cookie; it cannot make a form."""
    await filled(quiet_mem)
    async with pages(quiet_mem, write=True) as http:
        http.cookies.set("aiopersist_form", "planted")
        for guess in ("planted", ""):
            form = {**ORDERS, "action": "compact", "form": guess}
            assert (await http.post("/do", data=form)).status_code == 403
    assert len((await quiet_mem.inspect("orders")).batches) == 5


async def test_a_form_is_taken_by_another_process(quiet_mem: ap.Client) -> None:
    await filled(quiet_mem)
    async with pages(quiet_mem, write=True) as one, pages(quiet_mem, write=True) as other:
        form = {**ORDERS, "action": "fsck", "form": await secret_of(one)}
        other.cookies = one.cookies
        assert (await other.post("/do", data=form)).status_code == 303


async def test_an_inspector_that_only_reads_offers_nothing(quiet_mem: ap.Client) -> None:
    await filled(quiet_mem)
    async with pages(quiet_mem) as http:
        page = await http.get("/shard", params=ORDERS)
        assert 'action="do"' not in page.text
        assert "set-cookie" not in page.headers
        http.cookies.set("aiopersist_form", "x")
        form = {**ORDERS, "action": "compact", "form": "x"}
        assert (await http.post("/do", data=form)).status_code == 403
    assert len((await quiet_mem.inspect("orders")).batches) == 5


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"action": "drop"}, "action='drop': one of compact, gc, fsck, retain, tag, untag"),
        ({"action": "tag", "tag": "x", "days": "0"}, "days='0': a number of days"),
        ({"action": "tag", "tag": "x", "days": "soon"}, "days='soon': a number of days"),
        ({"action": "retain", "keep": "-1", "unit": "days"}, "keep='-1' 'days'"),
        ({"action": "retain", "keep": "9" * 18, "unit": "days"}, "longer than the clock counts"),
        ({"action": "retain", "keep": "1", "unit": "years"}, "keep='1' 'years'"),
        ({"action": "gc", "name": "nowhere"}, "there is no shard"),
        ({"action": "x" * 70_000}, "more than 65,536 bytes"),
    ],
)
async def test_a_mistake_in_a_form_is_named(quiet_mem: ap.Client, form: dict[str, str], said: str) -> None:
    await filled(quiet_mem)
    async with pages(quiet_mem, write=True) as http:
        secret = await secret_of(http)
        page = await http.post("/do", data={**ORDERS, "form": secret, **form})
        assert page.status_code in (400, 404)
        assert said in words(page)


async def test_one_piece_of_work_at_a_time_and_a_failure_is_told(
    quiet_mem: ap.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(quiet_mem)
    may_end = asyncio.Event()

    async def fail(shard: str) -> None:
        await may_end.wait()
        raise ap.Corruption("<b>it is damaged</b>")

    monkeypatch.setattr(quiet_mem.admin, "force_compaction", fail)
    async with pages(quiet_mem, write=True) as http:
        form = {**ORDERS, "form": await secret_of(http), "action": "compact"}
        assert (await http.post("/do", data=form)).status_code == 303
        again = await http.post("/do", data={**form, "action": "gc"})
        assert again.status_code == 400
        assert "Compaction of this shard is running" in words(again)
        may_end.set()
        while "running for" in (await http.get("/shard", params=ORDERS)).text:
            await asyncio.sleep(0.01)
        page = await http.get("/shard", params=ORDERS)
    assert "Corruption: &lt;b&gt;it is damaged&lt;/b&gt;" in page.text
