"""Keys that a read looks for: what statistics say, and which rows have them."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiopersist.base.frontier import Antichain, Description
from aiopersist.data.part.part import PartWriter, plan_ranges, read_index, read_row_groups, read_rows
from aiopersist.data.part.wanted_keys import WantedKeys
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.consolidate import sort_and_consolidate
from aiopersist.data.updates.convert import to_table
from aiopersist.data.updates.updates import Updates
from tests.data import data_oracle as oracle

FLAT = {
    "bytes-str",
    "int-unit",
    "float-optional float",
    "optional bool-decimal",
    "uuid-enum",
    "date-datetime",
}


def keys_of(case: oracle.Case, keys: list[Any]) -> pa.Array:
    column = oracle.schema_of(case).key.encode(keys)
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def values(table: pa.Table, schema: Schema[Any, Any, Any]) -> list[Any]:
    return list(map(oracle.canonical, schema.key.decode(table.column("key"))))


@pytest.mark.parametrize("name", [n for n, case in oracle.CASES.items() if case.time == 1 or n in FLAT])
def test_what_is_there_is_found(name: str) -> None:
    """Goal: no row of a wanted key is missed, in row groups of any size; a flat key brings no other rows."""
    case = oracle.CASES[name]
    schema = oracle.schema_of(case)

    @settings(max_examples=40)
    @given(oracle.rows_of(case), st.lists(case.keys, min_size=1, max_size=3), st.data())
    def check(rows: list[Any], others: list[Any], data: Any) -> None:
        table = sort_and_consolidate(to_table(rows, schema))
        if not table.num_rows:
            return
        size = data.draw(st.sampled_from([1, 40, 10_000]))
        start = Antichain(0) if case.time == 1 else Antichain((0,) * case.time)
        part = PartWriter(schema, Description(start, Antichain(), start)).whole(table, size)
        index = read_index(bytes(part.data), part)
        there = schema.key.decode(table.column("key"))
        keys = [*data.draw(st.lists(st.sampled_from(there), max_size=3)), *others]
        wanted = WantedKeys(keys_of(case, keys))
        names = set(map(oracle.canonical, keys))
        expected = [value for value in map(oracle.canonical, there) if value in names]
        chosen = [n for n, group in enumerate(index.row_groups) if wanted.may_be_in(group.stats)]
        assert wanted.may_be_in(part.stats) or not expected
        if chosen:
            ((offset, length),) = plan_ranges(
                index, range(len(index.row_groups)), gap_bytes=0, range_bytes_max=2**30
            )
            given = offset, bytes(part.data[offset : offset + length])
            found = read_rows(index, given, chosen, schema, wanted)
            found.validate(full=True)
            whole = read_row_groups(index, [given], chosen, schema)
            by_all = Updates(wanted.of(whole), schema).rows()
            assert oracle.plain(Updates(found, schema).rows()) == oracle.plain(by_all)
            names_found = values(found, schema)
        else:
            names_found = []
        assert [value for value in names_found if value in names] == expected
        if name in FLAT:
            assert names_found == expected

    check()


def test_statistics_exclude_what_is_not_there() -> None:
    """Goal: a look-up of a key reads one row group."""
    int_stats = {"key": {"min": 10, "max": 20, "nulls": 0}}
    text_stats = {"key": {"min": "b", "max": "d", "nulls": 0}}
    for keys, expected in {
        (9,): False,
        (10,): True,
        (20,): True,
        (21,): False,
        (9, 21): False,
        (9, 15): True,
    }.items():
        assert WantedKeys(pa.array(keys)).may_be_in(int_stats) is expected, keys
    for key, expected in {"a": False, "b": True, "ca": True, "d": True, "da": False}.items():
        assert WantedKeys(pa.array([key])).may_be_in(text_stats) is expected, key
    nan, null = pa.array([float("nan")]), pa.array([None], pa.float64())
    numbers = {"min": 1.0, "max": 2.0, "nulls": 0}
    assert not WantedKeys(nan).may_be_in({"key": numbers})
    assert WantedKeys(nan).may_be_in({"key": {**numbers, "max": "nan"}})
    assert not WantedKeys(null).may_be_in({"key": numbers})
    assert WantedKeys(null).may_be_in({"key": {**numbers, "nulls": 1}})
    assert WantedKeys(pa.array([3.0])).may_be_in({"key": {**numbers, "max": None}})


@pytest.mark.parametrize("stats", [None, {}, {"key": {"min": "x", "max": [], "nulls": 0}}])
def test_without_bounds_anything_may_be_there(stats: Any) -> None:
    assert WantedKeys(pa.array([1])).may_be_in(stats)
