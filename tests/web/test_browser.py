"""Goal: in a real browser the pages show what is there, panes that are live move, hostile texts do no harm,
and everybody can use them: by keyboard, on a phone, without scripts, in the dark."""

import re
from collections.abc import Iterator
from datetime import timedelta
from urllib.parse import urlencode

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

import aiopersist as ap
from tests.web.browser import WAIT_MS, Served, chromium, visiting

pytestmark = pytest.mark.slow

STRINGS = ap.Schema(str, str)
HOSTILE = "<script>pwned=1</script>\u202e\"'&\t\x1b[31m"
VALS = {
    "a script": "<script>pwned=1</script>",
    "an image": '"><img src=http://elsewhere.example/x onerror="pwned=1">',
    "the end of a cell": "</bdi></td></tr></table></textarea></title><script>pwned=1</script>",
    "a template": "{{ 7 * 7 }} {% raw %} ${7*7}",
    "controls": "\x1b[2J\x07\r\n\x7f\u0085",
    "other direction": "\u202egnp.exe \u05e9\u05dc\u05d5\u05dd \u200f",
    "long": "<b>" * 350_000,
    "nothing": "",
}
expect.set_options(timeout=WAIT_MS)
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def served(browser: Browser) -> Iterator[Served]:
    with Served() as served:
        served.run(fill(served.client))
        yield served


async def fill(client: ap.Client) -> None:
    async with client.writer(HOSTILE, STRINGS) as writer:
        await writer.compare_and_append([(key, val, 0, 1) for key, val in VALS.items()], 0, 1)
        await writer.compare_and_append(
            [(val, key, 1, 1) for key, val in VALS.items() if key != "long"], 1, 2
        )
    async with client.writer("orders", STRINGS) as writer:
        for time in range(30):
            rows = [(f"o{time:02}-{n}", "paid", time, 1) for n in range(1 + time % 5 * 30)]
            await writer.compare_and_append(rows, time, time + 1)
    await client.admin.retain("orders", timedelta(days=1))
    await client.critical_since("orders", HOSTILE[:40].encode("ascii", "ignore").decode().replace("\x1b", ""))
    await client.subscription("orders", name="search", start=12)
    await client.tag("orders", "noon", 12, expires=timedelta(days=30))
    await client.tag(HOSTILE, HOSTILE[:100])
    await client.table("stock", str, int).put_many({f"item {n:03}": n for n in range(120)})
    for number in range(60):
        async with client.writer(f"events/{number:02}", STRINGS):
            pass


def of(page: str, name: str, **query: object) -> str:
    return f"{page}?{urlencode({'name': name, **query})}"


ADDRESSES = {
    "location": "",
    "shard": of("shard", "orders"),
    "batch": of("shard", "orders", batches="1-9"),
    "contents": of("contents", "stock"),
    "changes": of("contents", "orders", at=20, since=10, changes=1),
    "tag": of("contents", "orders", tag="noon"),
    "hostile": of("contents", HOSTILE),
    "hostile then": of("contents", HOSTILE, at=0),
    "hostile shard": of("shard", HOSTILE),
    "error": of("shard", "nowhere"),
}


def test_from_the_location_to_a_shard_to_a_batch_and_its_contents(served: Served, browser: Browser) -> None:
    with visiting(browser, served.address, viewport=WIDE) as visitor:
        page = visitor.open("")
        page.get_by_role("searchbox").fill("orde")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("table.shards tbody tr")).to_have_count(1)
        page.get_by_role("link", name="orders").click()
        expect(page.get_by_role("heading", level=1)).to_have_text("orders")
        boxes = page.locator("svg .box")
        expect(boxes).to_have_count(30)
        expect(page.locator("svg .mark.subscription text")).to_have_text("search")
        boxes.nth(4).click(force=True)
        expect(page.locator("#batch")).to_contain_text("Batch ")
        expect(page.locator("svg .chosen")).to_have_count(1)
        page.get_by_role("link", name="Contents", exact=True).click()
        expect(page.locator("#page tbody tr")).to_have_count(50)
        page.get_by_role("link", name="Next").click()
        expect(page.locator(".pages")).to_contain_text("51 to 100")


def test_panes_that_are_live_move(served: Served, browser: Browser) -> None:
    with visiting(browser, served.address) as visitor:
        page = visitor.open("?q=moving")
        expect(page.locator("#shards")).to_contain_text("No name contains")
        served.run(append(served.client, "moving", 0))
        expect(page.locator("#shards tbody tr")).to_have_count(1)
        visitor.open(of("shard", "moving"))
        expect(page.locator("svg .box")).to_have_count(1)
        served.run(append(served.client, "moving", 1))
        expect(page.locator("svg .box")).to_have_count(2)
        expect(page.locator("#figures")).to_contain_text(re.compile(r"Upper\s*2"))


async def append(client: ap.Client, name: str, time: int, key: str = "k", val: str = "v") -> None:
    async with client.writer(name, STRINGS) as writer:
        await writer.compare_and_append([(key, val, time, 1)], time, time + 1)


def test_live_changes_come_while_they_are_followed(served: Served, browser: Browser) -> None:
    served.run(append(served.client, "live", 0))
    with visiting(browser, served.address) as visitor:
        page = visitor.open(of("contents", "live"))
        pane = page.locator(".live")
        pane.get_by_role("button", name="Follow").click()
        expect(pane.get_by_role("status")).to_contain_text("complete before 1")
        for time, (key, val) in enumerate(VALS.items(), 1):
            served.run(append(served.client, "live", time, key, val))
        expect(pane.get_by_role("status")).to_contain_text(f"{len(VALS)} updates so far")
        expect(pane.locator("tbody tr")).to_have_count(len(VALS))
        expect(pane.locator("tbody")).to_contain_text(VALS["a script"])
        assert page.evaluate("typeof pwned") == "undefined"
        pane.get_by_role("button", name="Stop").click()
        expect(pane.get_by_role("status")).to_have_text("Not following.")


def test_the_slider_moves_through_time_by_keyboard(served: Served, browser: Browser) -> None:
    with visiting(browser, served.address) as visitor:
        page = visitor.open(of("contents", "orders"))
        expect(page.locator("#rows")).to_have_text("As of 29")
        slider = page.get_by_label("As of", exact=True)
        slider.focus()
        slider.press("Home")
        expect(page.locator("#rows")).to_have_text("As of 0")
        expect(page.locator("#page tbody tr")).to_have_count(1)
        slider = page.get_by_label("As of", exact=True)
        slider.focus()
        slider.press("ArrowRight")
        expect(page.locator("#rows")).to_have_text("As of 1")


@pytest.mark.parametrize("name", ["location", "hostile shard", "hostile", "hostile then"])
def test_hostile_texts_do_no_harm(served: Served, browser: Browser, name: str) -> None:
    with visiting(browser, served.address) as visitor:
        page = visitor.open(ADDRESSES[name])
        page.wait_for_load_state("networkidle")
        assert page.evaluate("typeof pwned") == "undefined"
        assert page.locator("main img, main script, main b").count() == 0
        assert not re.search("[\x00-\x08\x0e-\x1f\x7f\u202e]", page.locator("main").inner_text())
        if name.startswith("hostile") and "shard" not in name:
            rows = len(VALS) + (0 if "then" in name else len(VALS) - 1)
            expect(page.locator("#page tbody tr")).to_have_count(rows)
            expect(page.locator("#page table")).to_contain_text("<script>pwned=1</script>")


def test_a_long_value_is_cut_and_its_whole_is_plain_text(served: Served, browser: Browser) -> None:
    with visiting(browser, served.address) as visitor:
        page = visitor.open(of("contents", HOSTILE, at=0))
        with page.expect_navigation(wait_until="load"):  # a page this long is shown before its end is there
            page.get_by_role("link", name="all 1,050,000 characters").click()
        assert page.evaluate("document.contentType") == "text/plain"
        assert page.locator("body").inner_text() == VALS["long"]


def test_rows_that_take_long_follow(
    served: Served, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiopersist.web.reads.WAIT_S", 0.0)
    with visiting(browser, served.address) as visitor:
        page = visitor.open(of("contents", "stock", how="prefix", key="item 00"))
        expect(page.locator("#page tbody tr")).to_have_count(10)


def test_a_shard_whose_state_takes_long_follows(
    served: Served, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    with visiting(browser, served.address) as visitor:
        monkeypatch.setattr("aiopersist.web.cache.WAIT_S", 0.0)
        page = visitor.open(of("shard", "orders"))
        expect(page.get_by_role("status")).to_have_text("Reading the state of the shard.")
        monkeypatch.setattr("aiopersist.web.cache.WAIT_S", 30.0)
        expect(page.get_by_role("heading", level=1)).to_have_text("orders")


def test_all_pages_can_be_read_without_scripts(served: Served, browser: Browser) -> None:
    with visiting(browser, served.address, java_script_enabled=False) as visitor:
        page = visitor.open("")
        page.locator("#sort").select_option("updates")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("table.shards tbody tr").first).to_contain_text("orders")
        page.get_by_role("link", name="Next").click()
        expect(page.locator(".pages")).to_contain_text("Page 2 of 2")
        page = visitor.open(of("contents", "stock"))
        page.locator("#how").select_option("prefix")
        page.locator("#key").fill("item 11")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("#page tbody tr")).to_have_count(10)
        expect(page.locator(".live")).to_be_hidden()


@pytest.mark.parametrize("address", ADDRESSES.values(), ids=ADDRESSES)
def test_everybody_can_use_it(served: Served, browser: Browser, address: str) -> None:
    for scheme, size in (("light", WIDE), ("dark", PHONE)):
        with visiting(browser, served.address, color_scheme=scheme, viewport=size) as visitor:
            page = visitor.open(address)
            found = Axe().run(page).response["violations"]
            assert [said(fault) for fault in found if fault["impact"] in ("serious", "critical")] == []
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            page.keyboard.press("Tab")
            expect(page.locator(":focus")).to_have_text("Skip to the contents")


def said(fault: dict[str, object]) -> str:
    nodes = fault["nodes"]
    assert isinstance(nodes, list)
    return f"{fault['id']}: {fault['help']}: {[node['html'][:200] for node in nodes[:3]]}"


def test_a_phone_shows_the_figures_of_a_shard_with_their_names(served: Served, browser: Browser) -> None:
    with visiting(browser, served.address, viewport=PHONE) as visitor:
        page: Page = visitor.open("?q=orders")
        figure = page.locator("td[data-label=updates]")
        expect(figure).to_be_visible()
        assert figure.evaluate("cell => getComputedStyle(cell, '::before').content") == '"updates "'
