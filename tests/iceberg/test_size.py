"""Goal: of a table of 100,000 keys in 20 puts, of which 10 % were updated and 1 % deleted, a publication
writes at most 3 % of the bytes of the data, and every data file but those rows of no part is a live blob."""

import asyncio
import random
from pathlib import Path

import pytest
from pydantic import BaseModel

import aiopersist as ap
from tests.iceberg.kit import ENGINES, contents, files_of, own_files, part_key
from tests.support.shards import named_parts

KEYS, PUTS = 100_000, 20


class Order(BaseModel):
    amount: int
    price: float
    name: str
    tags: list[str]
    note: str | None = None


def order(number: int, seed: random.Random, version: int = 0) -> Order:
    name = f"name {seed.randrange(10**9)} of {number}"
    note = None if number % 11 else "n"
    amount = number + version * 1_000_000
    return Order(amount=amount, price=number * 0.5, name=name, tags=["a", "b"][: number % 3], note=note)


@pytest.mark.slow
async def test_how_much_is_written(tmp_path: Path) -> None:
    seed = random.Random(1)
    numbers = list(range(KEYS))
    seed.shuffle(numbers)
    async with ap.open(tmp_path, maintenance=False) as client:
        table = client.table("t", key=str, val=Order)
        for put in range(PUTS):
            some = numbers[put::PUTS]
            await table.put_many({f"k{number:06d}": order(number, seed) for number in some})
        updated = seed.sample(range(KEYS), KEYS // 10)
        for put in range(5):
            await table.put_many({f"k{number:06d}": order(number, seed, 1) for number in updated[put::5]})
        deleted = seed.sample(range(KEYS), KEYS // 100)
        await table.delete(*(f"k{number:06d}" for number in deleted))
        published = await client.publish(table)
        expected = await contents(client)
        assert published.rows == KEYS - KEYS // 100
        for read in ENGINES.values():
            assert await asyncio.to_thread(read, published.metadata) == expected
        parts = [part_key(uri) for uri in files_of(published.metadata, 0)]
        live = set(await named_parts(client))
        assert {key for key in parts if key} <= live
        assert parts.count("") <= 1
        data = sum((tmp_path / "blob" / key).stat().st_size for key in live)
        written = sum(own_files(tmp_path).values())
        assert published.bytes_written <= written
        print(f"{written:,} of {data:,} bytes: {written / data:.2%}")
        assert written <= 0.03 * data
