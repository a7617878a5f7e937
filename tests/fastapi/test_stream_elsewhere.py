"""Goal: a client goes on in another process where it was."""

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
