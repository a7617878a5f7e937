"""Goal: columns are those of the contents, summed again, in their order; as they are read where that can
be."""

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from tests.read.test_query import CONDITIONS, MODELS, SCHEMA, client_of, filled

PROJECTIONS: dict[str, tuple[list[str], Any]] = {
    "key": (["key"], lambda k, v: (k,)),
    "a field of the key": (["key.region"], lambda k, v: (k.region,)),
    "flat": (["region", "amount"], lambda k, v: (k.region, v.amount)),
    "of the val, the other way round": (["val.number", "key.number"], lambda k, v: (v.number, k.number)),
    "lists": (["tags"], lambda k, v: (v.tags,)),
    "all of it": (["val", "key"], lambda k, v: (v, k)),
    "the key first": (["key", "amount"], lambda k, v: (k, v.amount)),
    "fields of the key, then another": (
        ["region", "key.number", "amount"],
        lambda k, v: (k.region, k.number, v.amount),
    ),
    "none": ([], lambda k, v: ()),
}


@pytest.mark.parametrize("bounds", ["inline", "tiny parts"])
async def test_columns_are_summed_again(bounds: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiopersist.read.stream.FOLD_ROWS_MIN", 8)
    async with client_of(bounds) as client:
        model = await filled(client, seed=1)
        async with client.reader("s", MODELS) as reader, reader.snapshot() as s:
            for columns, of in PROJECTIONS.values():
                for where, matches in (CONDITIONS["range"], (None, lambda k, v: True)):
                    sums: Counter[str] = Counter()
                    for key, val, diff in model:
                        if matches(key, val):
                            sums[repr(of(key, val))] += diff
                    expected = sorted((row, diff) for row, diff in sums.items() if diff)
                    rows = await s.rows(where=where, columns=columns)
                    assert sorted((repr(row[:-1]), row[-1]) for row in rows) == expected, columns
                    table = await s.to_arrow(where, columns)
                    assert table.column_names == [*columns, "diff"]
                    batches = [batch async for batch in s.batches(where, columns)]
                    assert pa.Table.from_batches(batches, table.schema).equals(table)


async def test_columns_of_the_key_stream() -> None:
    """Goal: a result that begins with the key comes as it is read; any other one comes at the end."""
    async with client_of("tiny row groups") as client:
        async with client.writer("t", SCHEMA) as writer:
            for time in range(3):
                await writer.compare_and_append(
                    [(f"k{n % 300:03}", n, time, 1) for n in range(900)], time, time + 1
                )
        async with client.reader("t", SCHEMA) as reader, reader.snapshot() as s:
            found = [batch async for batch in s.batches(columns=["key"])]
            assert len(found) > 3
            assert [row for b in found for row in b.to_pylist()] == [
                {"key": f"k{n:03}", "diff": 9} for n in range(300)
            ]
            assert len([batch async for batch in s.batches(columns=["val"])]) == 1
