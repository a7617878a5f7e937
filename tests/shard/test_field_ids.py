"""Goal: the parts of a shard have the same field ids, whichever process writes or compacts them."""

import sys
from pathlib import Path
from typing import Any

import anyio
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

import aiopersist as ap
from tests.data.test_field_ids import ids_in

BLOBS = ap.Settings(inline_writes_single_max_bytes=0)


class First(BaseModel):
    name: str


class Second(BaseModel):
    name: str
    age: int | None = None


class Third(BaseModel):
    tags: list[str] | None = None
    name: str
    age: int | None = None


class Fourth(BaseModel):
    tags: list[str] | None = None
    name: str
    city: str | None = None
    age: int | None = None


VALUES: list[type[BaseModel]] = [First, Second, Third, Fourth]
VERSIONS: list[Any] = [ap.Schema(key=int, val=value) for value in VALUES]
IDS = {"val.name": 16, "val.age": 17, "val.tags": 18, "val.tags.element": 19, "val.city": 20}
ALONE = {"val.tags": 16, "val.tags.element": 17, "val.name": 18, "val.city": 19, "val.age": 20}
ROOTS = {"key": 1, "val": 2, "time": 3, "diff": 4}


PROGRAM = """
import asyncio, sys
from tests.shard.test_field_ids import add
asyncio.run(add(sys.argv[1], int(sys.argv[2])))
"""


async def add(folder: str, number: int) -> None:
    """Evolve to the version of that number, and append a row, in a client of its own."""
    async with ap.open(folder, settings=BLOBS, maintenance=False) as client:
        if number:
            await client.compare_and_evolve_schema("t", number - 1, VERSIONS[number])
        async with client.writer("t", VERSIONS[number]) as w:
            row: Any = (number, VALUES[number](name="n"), number, 1)
            await w.compare_and_append([row], number, number + 1)


def stored_ids(folder: Path) -> list[dict[str, int]]:
    """The ids of each part, oldest first."""
    parts = sorted(folder.rglob("*.parquet"), key=lambda path: path.stat().st_mtime_ns)
    return [ids_in(pq.read_schema(path)) for path in parts]


async def test_processes_that_evolve_a_shard_in_turns_number_its_fields_alike(tmp_path: Path) -> None:
    for number in range(4):
        if number % 2:
            await anyio.run_process([sys.executable, "-c", PROGRAM, str(tmp_path), str(number)])
        else:
            await add(str(tmp_path), number)
    for part in (parts := stored_ids(tmp_path)):
        assert part.items() <= (ROOTS | IDS).items()
    assert [len(part) for part in parts] == [5, 6, 8, 9]
    async with ap.open(tmp_path, settings=BLOBS, maintenance=False) as client:
        async with client.writer("t", VERSIONS[1]) as old:  # it knows only the first two versions
            await old.compare_and_append([(4, Second(name="n"), 4, 1)], 4, 5)
        assert stored_ids(tmp_path)[-1] == parts[1]
        await client.admin.force_compaction("t")
    assert stored_ids(tmp_path)[-1] == ROOTS | IDS


async def test_no_read_returns_ids(tmp_path: Path) -> None:
    await add(str(tmp_path), 0)
    async with ap.open(tmp_path, settings=BLOBS) as client, client.reader("t") as r:
        async with r.snapshot() as s:
            tables = [await s.to_arrow(), *[batch async for batch in s.batches()]]
            tables.append(await s.to_arrow(columns=["val"]))
        async with r.listen(as_of=0) as listen:
            await add(str(tmp_path), 1)
            tables.append((await anext(listen)).to_arrow())
    for table in tables:
        with pytest.raises(TypeError):  # there is no metadata
            ids_in(table.schema)


async def test_streams_have_the_ids_of_their_own_schemas(tmp_path: Path) -> None:
    settings = ap.Settings(indexed_inline_total_max_bytes=0, inline_writes_single_max_bytes=0)
    async with ap.open(tmp_path, settings=settings, maintenance=False) as client:
        async with client.indexed("x") as ix:
            for number, value in enumerate((First, Fourth)):
                stream = await ix.register(value.__name__, int, value)
                await ix.write([(stream, [(1, value(name="n"), 1, 1), (2, value(name="n"), 2, 1)])])
                assert stored_ids(tmp_path)[-1] == ({"val.name": 16}, ALONE)[number] | ROOTS
