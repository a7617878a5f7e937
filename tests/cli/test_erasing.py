"""Goal: `erase` says what has the rows and who keeps them, with exit status 0 only if nothing has; `retain`
and `compact` say who holds history; a hold that `show` names can be ended."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import aiopersist as ap
from tests.cli.test_commands import aiopersist


def beside(folder: Path, body: Callable[[ap.Client, ap.Table[str, str]], Awaitable[None]]) -> None:
    async def run() -> None:
        async with ap.open(folder, maintenance=False) as client:
            await body(client, client.table("people", key=str, val=str))

    asyncio.run(run())


@pytest.fixture
def location(tmp_path: Path) -> Path:
    async def fill(client: ap.Client, people: ap.Table[str, str]) -> None:
        await people.put_many({"ada": "ada@home", "bob": "bob@home"})
        await people.put("ada", "ada@work")
        await client.reader("people", hold=0, hold_name="nightly", lease_s=86_400)
        async with client.subscription("people", name="mailer"):
            pass
        await people.put("cid", "cid@home")

    beside(tmp_path, fill)
    return tmp_path


def test_an_erasure(location: Path) -> None:
    ada = ("erase", "people", "--location", location, "--wait", "0s", "--keys", "ada")
    would = aiopersist(*ada)
    assert would.status == 1 and "1 row in the contents" in would.out and "still in version" in would.out
    assert "nothing was changed: add --yes" in would.err
    assert aiopersist("get", "people", "ada", "--location", location).out == '"ada@work"\n'

    held = aiopersist(*ada, "--yes")
    assert held.status == 1 and "1 row deleted" in held.out
    assert "named hold 'nightly'" in held.out and "subscription 'mailer'" in held.out
    some = aiopersist(*ada, "--yes", "--end-hold", "nightly", "--json")
    told = json.loads(some.out)
    assert (some.status, told["done"], [h["id"] for h in told["holders"]]) == (1, False, ["mailer"])
    assert [h["id"] for h in told["ended"]] == ["nightly"] and told["remnants"][0]["kind"] == "version"

    done = aiopersist(*ada, "--yes", "--end-hold", "subscription:mailer")
    assert done.status == 0 and "no version, part, rollup or tag has any" in done.out
    again = aiopersist(*ada)
    assert again.status == 0
    assert json.loads(aiopersist("get", "people", "bob", "--location", location).out) == "bob@home"


def test_an_erasure_that_a_tag_keeps(tmp_path: Path) -> None:
    async def fill(client: ap.Client, people: ap.Table[str, str]) -> None:
        await people.put_many({"ada": "ada@home", "bob": "bob@home"})
        await client.tag(people, "monday")

    beside(tmp_path, fill)
    ada = ("erase", "people", "--location", tmp_path, "--wait", "0s", "--keys", "ada")
    would, held = aiopersist(*ada), aiopersist(*ada, "--yes")
    assert would.status == held.status == 1
    assert "\n  tag 'monday' keeps the contents at 20" in held.out and "tag 'monday'" in would.out
    done = aiopersist(*ada, "--yes", "--end-hold", "monday", "--json")
    told = json.loads(done.out)
    assert (done.status, told["done"], [h["id"] for h in told["ended"]]) == (0, True, ["monday"])


def test_an_erasure_by_a_condition(location: Path) -> None:
    ends = ("--end-hold", "mailer", "--end-hold", "nightly")
    where = ("erase", "people", "--location", location, "--where", "val = 'ada@home'", *ends)
    assert aiopersist(*where, "--yes").status == 0  # it was so once, and is not so now
    assert json.loads(aiopersist("get", "people", "ada", "--location", location).out) == "ada@work"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ([], "say which rows: --keys KEY, or --where EXPR"),
        (["--keys", "ada", "--wait", "soon"], "--wait 'soon' is no duration"),
        (["--where", "nothing = 1"], "--where: no column 'nothing'"),
    ],
)
def test_an_erasure_that_says_nothing(location: Path, options: list[str], told: str) -> None:
    found = aiopersist("erase", "people", "--location", location, *options)
    assert found.status == 2 and told in found.err


def test_retain_and_compact_say_who_holds_history(location: Path) -> None:
    for command in (["retain", "people", "--keep", "0"], ["compact", "people"]):
        told = aiopersist(*command, "--location", location).out
        assert "history is held longer:" in told
        assert "named hold 'nightly'" in told and "if its process has ended" in told
        assert "subscription 'mailer'" in told and "until it acknowledges or is dropped" in told
        (result,) = map(json.loads, aiopersist(*command, "--json", "--location", location).out.splitlines())
        assert {holder["id"] for holder in result["held_by"]} == {"nightly", "mailer"}
    aiopersist("retain", "people", "--keep", "all", "--location", location)
    assert "held" not in aiopersist("compact", "people", "--location", location).out


def test_a_named_hold_can_be_ended(location: Path) -> None:
    at = ("--location", location)
    assert "nightly" in aiopersist("show", "people", *at).out
    refused = aiopersist("forget", "people", "nightly", *at)
    assert refused.status == 1 and "this is a hold: aiopersist release ends it" in refused.err
    refused = aiopersist("release", "people", "mailer", *at)
    assert refused.status == 1 and "this is a subscription: aiopersist forget drops it" in refused.err
    would = aiopersist("release", "people", "nightly", *at)
    assert would.status == 0 and "nightly would be released" in would.out and "add --yes" in would.err
    assert "nightly" in aiopersist("show", "people", *at).out
    done = aiopersist("release", "people", "nightly", "--yes", "--json", *at)
    assert json.loads(done.out) == {"done": True, "kind": "named", "since": [0]}
    assert "nightly" not in aiopersist("show", "people", *at).out


def test_a_hold_and_a_critical_since_of_one_name(location: Path) -> None:
    async def add(client: ap.Client, people: ap.Table[str, str]) -> None:
        await people.get("ada")
        await client.critical_since("people", "nightly")

    beside(location, add)
    at = ("--location", location, "--yes")
    refused = aiopersist("release", "people", "nightly", *at)
    assert refused.status == 1 and "add --kind" in refused.err
    assert aiopersist("release", "people", "nightly", "--kind", "critical", *at).status == 0
    shown = aiopersist("show", "people", "--location", location).out
    assert "critical" not in shown and "nightly" in shown
