"""Goal: the verdict on a long run notices what it is there for: each lie about what was told is found."""

import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import pytest

import aiopersist as ap
from tests.endurance.faults import Window
from tests.endurance.notes import Note, Notes
from tests.endurance.publications import Publications, Wrong, digest
from tests.endurance.verdict import Verdict, judged, judged_directory, told_by
from tests.endurance.worker import ACCOUNTS, BALANCE, LOG
from tests.support.published import counted

KEYS = {"write": "a0-write0-0", "append": "a0-append-0"}


def told(kind: str, op: str, at: float = 1.0) -> list[Note]:
    return [Note(at, "began", kind, op), Note(at + 0.1, "told", kind, op)]


TRUTH = [*told("write", KEYS["write"]), *told("append", KEYS["append"]), *told("count", "a0-count0-0", 5.0)]


def publication(version: int, val: int = 1) -> Note:
    """A note of a version that shows the log, with this val of each key."""
    rows = counted((key, val, 1) for key in KEYS.values())
    return Note(1.0, "told", "publish", "log", f"{version} {digest(0, rows)}")


async def verdict(
    notes: list[Note], *, delivered: int = 2, double: bool = False, pinned: bool = True
) -> Verdict:
    """Of a location in which the operations of `TRUTH` happened."""
    with TemporaryDirectory() as folder:
        async with ap.open(folder, maintenance=False) as client:
            await happened(client, delivered, double)
            for pin in [] if pinned else await client.tags("log"):
                await client.untag("log", pin)
            return await judged(client, notes, told_by(notes, [Window("cut s3", 2.0, 3.0)]))


async def happened(client: ap.Client, delivered: int, double: bool) -> None:
    await client.table("accounts", str, int).put_many({f"a{n}": BALANCE for n in range(ACCOUNTS)})
    await client.table("counters", str, int).put("a", 1)
    await client.table("delivered", str, int).put("all", delivered)
    async with client.writer("log", LOG) as writer:
        await writer.write([(key, 1, 2 if double else 1) for key in KEYS.values()])
    await client.tag("log", "a0-tag-0")
    await client.publish("log")


async def test_the_truth_is_good() -> None:
    tags = [Note(1.0, "told", "tag", f"a0-tag-{number}", "2") for number in range(2)]  # one has expired
    found = await verdict([*TRUTH, *tags, publication(1)])
    assert found.is_good
    assert found.operations == {"write": 1, "append": 1, "count": 1, "tag": 2, "publish": 1}
    assert found.longest[0] == (4.0, "cut s3")


@pytest.mark.parametrize(
    ("notes", "field"),
    [
        (lambda: [*TRUTH, *told("write", "a0-write0-1")], "lost"),
        (lambda: [*TRUTH, *told("append", "a0-append-1")], "lost"),
        (lambda: [*TRUTH, *told("count", "a0-count0-1")], "lost"),
        (lambda: TRUTH[:-2], "doubled"),
        (lambda: [*TRUTH, Note(9.0, "began", "count", "a0-count0-1")], "unknown"),
        (lambda: TRUTH[2:], "wrong"),
        (lambda: [*TRUTH, Note(monotonic(), "told", "tag", "a0-tag-1", "2")], "wrong"),
        (lambda: [*TRUTH, Note(monotonic(), "told", "tag", "a0-tag-0", "3")], "wrong"),
        (lambda: [*TRUTH, publication(2)], "wrong"),
        (lambda: [*TRUTH, publication(1, val=2)], "wrong"),
    ],
    ids=[
        "write",
        "append",
        "count",
        "counted twice",
        "never told",
        "written by nobody",
        "a tag",
        "a tag's rows",
        "a publication",
        "its rows",
    ],
)
async def test_a_lie_is_found(notes: Callable[[], list[Note]], field: str) -> None:
    found = await verdict(notes())
    assert not found.is_good
    assert getattr(found, field)


async def test_what_is_there_twice_or_was_delivered_twice_is_found() -> None:
    assert (await verdict(TRUTH, double=True)).doubled
    assert (await verdict(TRUTH, delivered=3)).wrong


async def test_a_publication_that_pins_nothing_is_found() -> None:
    assert "not pinned" in (await verdict(TRUTH, pinned=False)).wrong[0]


async def test_a_process_finds_a_wrong_row_of_a_kept_version(tmp_path: Path) -> None:
    async with ap.open(tmp_path / "there", maintenance=False) as client:
        await happened(client, 2, double=False)
        note = Notes(tmp_path / "notes")
        task = Publications("a", client, note, random.Random(2))
        await task.step()
        (version,) = task.rows
        task.rows[version].update({("another", 1): 1})
        async with client.writer("log", LOG) as writer:
            await writer.write([("more", 1)])
        with pytest.raises(Wrong, match=f"version {version} shows"):
            await task.step()


@pytest.mark.parametrize(
    ("notes", "there", "field"),
    [
        (told("local", "a0-local-0"), ["a0-local-0"], None),
        ([Note(1.0, "began", "local", "a0-local-0")], ["a0-local-0"], None),
        (told("local", "a0-local-0"), [], "lost"),
        (told("local", "a0-local-0"), ["a0-local-0", "a0-fork-0"], "wrong"),
    ],
    ids=["the truth", "killed in it", "lost", "put by a child"],
)
async def test_a_lie_about_the_directory_is_found(
    notes: list[Note], there: list[str], field: str | None
) -> None:
    found = Verdict()
    async with ap.open("mem://", maintenance=False) as client:
        await client.table("local", str, int).put_many(dict.fromkeys(there, 1))
        await judged_directory(client, notes, found)
    assert found.is_good == (field is None)
    assert field is None or getattr(found, field)
