"""Rows ordered by codes: texts of any bytes, columns in pieces, sizes, and the parts of one run."""

import random
import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import aiopersist as ap
from aiopersist.data.lazy import avoid_polars, avoids_polars
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates import codes
from aiopersist.data.updates.assemble import whole
from aiopersist.data.updates.consolidate import sort_and_consolidate, sorted_rows
from aiopersist.data.updates.convert import to_table
from aiopersist.data.updates.sizes import cut, goodbytes, groups, row_bytes
from tests.data import data_oracle as oracle
from tests.data.data_oracle import cases, schema_of
from tests.support.shards import MIB

BYTES = b"\0a\xff"


def texts(dice: random.Random, count: int) -> list[bytes]:
    """Some have a long prefix in common, some differ by zeros at their ends alone, some are empty."""
    prefix = bytes(dice.choices(BYTES, k=dice.choice([0, 3, 8, 21])))
    lengths = [dice.choice([0, 1, 7, 8, 9, 16, 40, 100]) for _ in range(count)]
    return [prefix + bytes(dice.choices(BYTES, [3, 1, 1], k=length)) for length in lengths]


@pytest.mark.parametrize("t", [pa.binary(), pa.large_binary()])
@pytest.mark.parametrize("seed", range(12))
def test_texts_are_ordered_by_their_bytes(seed: int, t: pa.DataType) -> None:
    dice = random.Random(seed)
    values: list[Any] = texts(dice, 400)
    if seed % 2:
        values = [None if dice.random() < 0.1 else value for value in values]
    before, after = dice.choice([(0, 0), (3, 0), (5, 7)])
    column = pa.array([b"xyz"] * before + values + [b"x"] * after, t).slice(before, len(values))
    order, same = codes.ordered([column], len(values))
    found = [values[row] for row in order]
    assert found == sorted(values, key=lambda v: () if v is None else (v,))
    assert sorted(order) == list(range(len(values)))
    assert list(same) == [found[i] == found[i + 1] for i in range(len(found) - 1)]


@pytest.mark.parametrize("seed", range(8))
def test_the_next_columns_order_those_that_are_equal(seed: int) -> None:
    dice = random.Random(seed)
    columns: list[list[Any]] = [
        dice.choices(range(-3, 3), k=500),
        [dice.choice([b"", b"a", b"a\0", b"b" * 90, b"b" * 90 + b"c"]) for _ in range(500)],
        dice.choices([0.5, -1.0, float("inf"), 0.0], k=500),
        dice.choices([True, False], k=500),
    ]
    dice.shuffle(columns)
    rows = list(zip(*columns, strict=True))
    order, same = codes.ordered([pa.array(column) for column in columns], 500)
    assert [rows[row] for row in order] == sorted(rows)
    assert list(same) == [rows[a] == rows[b] for a, b in pairwise(order)]


def test_sorted_runs_are_merged_and_what_is_sorted_stays() -> None:
    runs = [sorted(random.Random(seed).choices(range(10**6), k=5000)) for seed in range(3)]
    column = pa.array([n for run in runs for n in run])
    order, _ = codes.ordered([column], 15_000)
    assert [column[int(row)].as_py() for row in order] == sorted(n for run in runs for n in run)
    order, _ = codes.ordered([pa.array(runs[0])], 5000)
    assert list(order) == list(range(5000))


def test_a_column_in_pieces_of_one_array_is_not_copied() -> None:
    column = pa.array([b"a", b"bb", b"ccc", b"dddd", b"e"]).slice(1)
    pieces = pa.chunked_array([column.slice(0, 1), column.slice(1, 2), column.slice(3)])
    found = whole(pieces)
    assert found.equals(column)
    assert found.buffers()[2].address == column.buffers()[2].address
    other = pa.chunked_array([column.slice(1, 2), column.slice(0, 1)])
    assert whole(other).to_pylist() == [b"ccc", b"dddd", b"bb"]


@cases
def test_the_size_of_each_row(case: oracle.Case) -> None:
    """Goal: as that of a table of it alone."""
    from hypothesis import given, settings

    schema = schema_of(case)

    @settings(max_examples=20)
    @given(oracle.rows_of(case))
    def check(rows: list[Any]) -> None:
        table = to_table(rows, schema)
        sizes = [row_bytes(whole(column)) + np.zeros(len(rows), int) for column in table.columns]
        want = [goodbytes(table.slice(row, 1)) for row in range(len(rows))]
        assert list(sum(sizes)) == want

    check()


def test_tables_in_groups_are_one_that_is_cut() -> None:
    schema = Schema(str, int)
    rows = [(f"{n:03}" + "x" * (n * 7 % 50), n, 0, 1) for n in range(200)]
    table = sort_and_consolidate(to_table(rows, schema))
    for target in (1, 100, 999, 10**6):
        slices = (table.slice(at, 30) for at in range(0, 210, 30))
        found = [group.to_pylist() for group in groups(slices, target)]
        assert found == [group.to_pylist() for group in cut(table, target)]


def test_parts_end_where_they_reach_the_target() -> None:
    schema = Schema(str, int)
    rows = [(f"{n:03}" + "x" * (n * 7 % 50), n, 0, 1) for n in reversed(range(200))]
    found = sorted_rows([to_table(rows, schema)])
    table, start = sort_and_consolidate(to_table(rows, schema)), 0
    for end in found.cuts(1000):
        part = table.slice(start, end - start)
        assert goodbytes(part.slice(0, part.num_rows - 1)) < 1000
        assert goodbytes(part) >= 1000 or end == 200
        assert pa.concat_tables(found.tables(start, end, 7)).equals(part)
        start = end
    assert start == 200


async def test_a_table_of_several_parts_is_one_run() -> None:
    """Goal: a read of it need not merge."""
    dice = np.random.default_rng(1)
    keys = [b"%016d" % n for n in dice.permutation(60_000)]
    table = pa.table({"key": keys, "val": keys, "time": [0] * 60_000, "diff": [1] * 60_000})
    settings = ap.Settings(blob_target_size=2 * MIB)
    async with ap.open("mem://", settings=settings) as small, small.writer("t", ap.Schema(bytes, bytes)) as w:
        await w.compare_and_append(table, 0, 1)
        (batch,) = (await small.inspect("t")).batches
        assert (batch.parts, batch.runs) == (2, 1)
        async with small.reader("t") as reader, reader.snapshot() as snapshot:
            assert (await snapshot.to_arrow()).column("key").to_pylist() == sorted(keys)


@pytest.mark.parametrize("element", [pa.int64(), pa.float64(), pa.string(), pa.list_(pa.int16())], ids=str)
def test_lists_have_the_same_order_without_polars(element: pa.DataType) -> None:
    """A thread that serves polars may not call it."""
    values = {"int64": [1, -1, None], "double": [float("nan"), 0.5, None], "string": ["", "b", None]}
    dice = random.Random(str(element))
    pool = values.get(str(element), [[], [1], [1, 2], None])
    lists = [None if dice.random() < 0.1 else dice.choices(pool, k=dice.randrange(4)) for _ in range(300)]
    column = pa.array(lists, pa.list_(element))
    ways: list[Any] = []

    def without_polars() -> None:
        avoid_polars()
        assert avoids_polars()
        ways.append(codes.ordered([column], len(lists)))

    thread = threading.Thread(target=without_polars)
    thread.start()
    thread.join()
    assert not avoids_polars()
    order, same = codes.ordered([column], len(lists))
    assert list(ways[0][1]) == list(same)
    mine, its = (str(column.take(pa.array(rows)).to_pylist()) for rows in (ways[0][0], order))
    assert mine == its
