"""An append with `once=` to a shard that remembers 100,000 ids, beside an append to a shard with none."""

import asyncio
import itertools
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.state.once import IDS_MAX

SCHEMA = ap.Schema(key=str, val=int)
IN_A_COMMIT = 500


async def fill(writer: Any, ids_max: int) -> None:
    for start in range(0, ids_max, IN_A_COMMIT):
        ids = range(start, start + IN_A_COMMIT)
        await asyncio.gather(*(writer.write([], once=f"old {n}") for n in ids))


@pytest.mark.parametrize("place", ["mem", "files+sqlite"], indirect=True)
def test_append_beside_many_ids(place: Any, run: Any, rounds: Any, enabled: bool) -> None:
    client = run(ap.open(blob=place.blob, consensus=place.consensus))
    many, none = run(client.writer("many", SCHEMA)), run(client.writer("none", SCHEMA))
    run(fill(many, IDS_MAX if enabled else IN_A_COMMIT))
    new = itertools.count()

    async def beside_many() -> None:
        await many.write([("a", 1)], once=f"new {next(new)}")

    async def without() -> None:
        await none.write([("a", 1)])

    medians = rounds({"without ids": without, "beside 100,000 ids": beside_many}, 300 if enabled else 1)
    assert medians["beside 100,000 ids"] > 0
    run(client.aclose())
