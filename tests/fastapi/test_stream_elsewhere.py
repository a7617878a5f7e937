"""Goal: a client goes on in another process where it was."""

import shutil
from pathlib import Path

import pytest

from tests.fastapi.caller import Caller, running
from tests.fastapi.test_stream import application, put, said


async def test_another_process_goes_on() -> None:
    first, second = application("mem://shared"), application("mem://shared")
    async with running(first), running(second):
        await put(first, a=1)
        async with Caller(first, "/changes") as caller:
            (event,) = await caller.events(1)
        await put(first, a=2)
        async with Caller(second, "/changes", event.id) as caller:
            await caller.events(1)
            assert said(caller) == [("change", "a", 1, 2)]


@pytest.mark.parametrize("more", [0, 5], ids=["shorter", "another history"])
async def test_the_location_was_restored_from_a_backup(tmp_path: Path, more: int) -> None:
    """Goal: an id that was good before tells the client to begin anew, and alarms nobody."""
    place, backup = tmp_path / "place", tmp_path / "backup"
    first, second, third = (application(str(place)) for _ in range(3))
    async with running(first):
        await put(first, a=1)
        async with Caller(first, "/changes") as caller:
            await caller.events(1)
    shutil.copytree(place, backup)
    async with running(second), Caller(second, "/changes") as caller:
        await caller.events(1)
        await put(second, a=2)
        event = (await caller.events(2))[1]
    shutil.rmtree(place)
    shutil.move(backup, place)
    async with running(third):
        for number in range(more):
            await put(third, a=number + 10)
        async with Caller(third, "/changes", event.id) as caller:
            await caller.done()
    assert caller.status == 410
    assert b"Last-Event-ID" in caller.body
