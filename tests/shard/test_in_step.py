"""Goal: a client is not starved by another one of the same event loop, which needs fewer turns for a commit
than the first one from a refusal to its next try."""

import asyncio
import uuid

import aiopersist as ap
from tests.support.schemas import SCHEMA

COMMITS_MAX = 400


async def test_a_commit_comes_through_beside_appends_without_a_pause() -> None:
    place = f"mem://{uuid.uuid4().hex}"
    async with (
        ap.open(place, maintenance=False) as one,
        ap.open(place, maintenance=False) as two,
        one.writer("t", SCHEMA) as busy,
    ):
        opening = asyncio.ensure_future(two.writer("t", SCHEMA))  # which registers it
        for time in range(COMMITS_MAX):
            await busy.compare_and_append([("busy", 1, time, 1)], time, time + 1)
            if opening.done():
                break
        else:
            raise AssertionError("the other one never comes through")
        await (await opening).aclose()
