"""Sorting, summing, times and merges: the columns agree with naive rows."""

from itertools import pairwise
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiopersist.base.errors import DiffOverflow
from aiopersist.base.frontier import Antichain
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates import codes, consolidate, sizes, times
from aiopersist.data.updates.convert import to_table
from aiopersist.data.updates.merge import Merge
from aiopersist.data.updates.order import row_keys
from aiopersist.data.updates.tiny import TINY_BYTES, TINY_ROWS, tiny
from aiopersist.data.updates.updates import Updates, decode_rows
from tests.data import data_oracle as oracle
from tests.data.data_oracle import cases, schema_of

WAYS = ("tuples", "codes", "ranks")


def with_way(way: str, call: Any) -> Any:
    """Runs `call` with every table sorted as tuples, by codes, or by codes of which texts have one each."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consolidate, "TUPLE_ROWS_MAX", 10**9 if way == "tuples" else 0)
        patch.setattr(codes, "TEXT_CODES", 1 if way == "ranks" else codes.TEXT_CODES)
        return call()


@pytest.mark.parametrize("way", WAYS)
@cases
def test_consolidated_is_what_the_oracle_says(case: oracle.Case, way: str) -> None:
    schema = schema_of(case)

    @settings(max_examples=25)
    @given(oracle.rows_of(case))
    def check(rows: list[Any]) -> None:
        table = with_way(way, lambda: consolidate.sort_and_consolidate(to_table(rows, schema)))
        table.validate(full=True)
        assert table.schema.equals(schema.arrow_schema)
        assert oracle.plain(Updates(table, schema).rows()) == oracle.consolidated(rows)

    check()


@cases
def test_row_keys_order_as_the_oracle(case: oracle.Case) -> None:
    schema = schema_of(case)

    @settings(max_examples=25)
    @given(oracle.rows_of(case, oracle.small_diffs))
    def check(rows: list[Any]) -> None:
        keys = row_keys(to_table(rows, schema), ("key", "val", "time"))
        ranks = [[oracle.rank(v) for v in row[:3]] for row in rows]
        for i in range(len(rows) - 1):
            assert (keys[i] < keys[i + 1]) == (ranks[i] < ranks[i + 1])
            assert (keys[i] == keys[i + 1]) == (ranks[i] == ranks[i + 1])

    check()


@pytest.mark.parametrize("way", WAYS)
@cases
def test_contents_sum_or_overflow(case: oracle.Case, way: str) -> None:
    schema = schema_of(case)

    @settings(max_examples=15)
    @given(oracle.rows_of(case))
    def check(rows: list[Any]) -> None:
        want = oracle.consolidated(rows, columns=2)
        repeated = len({row[:2] for row in want}) < len(want)
        table = to_table(rows, schema)
        if repeated:
            with pytest.raises(DiffOverflow) as e:
                with_way(way, lambda: consolidate.contents(table, schema))
            assert (oracle.canonical(e.value.key), oracle.canonical(e.value.val)) in {r[:2] for r in want}
        else:
            got = with_way(way, lambda: consolidate.contents(table, schema))
            assert oracle.plain(decode_rows(got, schema), columns=2) == want

    check()


@pytest.mark.parametrize("length", [1, 2, 3])
def test_times_of_columns_are_those_of_rows(length: int) -> None:
    schema = Schema(key=int, val=None, time=length)
    one = oracle.times(length)

    @settings(max_examples=60)
    @given(st.lists(one, max_size=20), st.lists(one, max_size=3), one)
    def check(given_times: list[Any], some: list[Any], as_of: Any) -> None:
        rows = [(i, None, t, 1) for i, t in enumerate(given_times)]
        table, frontier = to_table(rows, schema), Antichain(*some)
        kept = lambda t: [row[0] for row in Updates(t, schema)]  # noqa: E731  # a phrase of this test
        ahead = [r[0] for r in rows if oracle.beyond(r[2], some)]
        behind = [r[0] for r in rows if not oracle.beyond(r[2], some)]
        assert kept(times.filter_times(table, lower=frontier)) == ahead
        assert kept(times.filter_times(table, upper=frontier)) == behind
        assert kept(times.filter_times(table, as_of=as_of)) == [
            r[0] for r in rows if oracle.less_equal(r[2], as_of)
        ]
        later = [r[0] for r in rows if not oracle.less_equal(r[2], as_of)]
        assert kept(times.filter_times(table, not_as_of=as_of)) == later
        assert times.first_row_not_beyond(table, frontier) == next(iter(behind), None)
        greatest = times.Greatest()
        for row in range(table.num_rows):
            greatest.add(table.slice(row, 1))
        found = greatest.beyond(frontier)
        assert (found in [rows[i][2] for i in ahead]) if ahead else found is None
        if some:
            advanced = times.advance(table, frontier)
            assert advanced.schema.equals(table.schema)
            assert [u.time for u in Updates(advanced, schema)] == [oracle.advanced(r[2], some) for r in rows]

    check()


@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("name", ["bytes-str", "models", "lists", "float-optional float"])
def test_merged_runs_are_the_consolidated_whole(name: str, final: bool) -> None:
    case = oracle.CASES[name]
    schema = schema_of(case)
    runs = st.lists(oracle.rows_of(case, oracle.small_diffs, max_size=25), min_size=1, max_size=4)

    @settings(max_examples=30)
    @given(runs, st.integers(1, 7))
    def check(runs: list[list[Any]], slab: int) -> None:
        tables = [consolidate.sort_and_consolidate(to_table(rows, schema)) for rows in runs]
        merge, at, given_out = Merge(len(runs), schema, final=final), [0] * len(runs), []
        while not merge.done:
            for run in merge.needs():
                piece = tables[run].slice(at[run], slab)
                merge.push(run, piece if piece.num_rows else None)
                at[run] += slab
            given_out.append(merge.pop())
        rows = decode_rows(pa.concat_tables(given_out), schema)
        columns = 2 if final else 3
        assert oracle.plain(rows, columns) == oracle.consolidated([r for run in runs for r in run], columns)

    check()


def test_a_merge_holds_few_slabs() -> None:
    """Memory is bounded by the number of runs and their slabs, for any contents of the runs."""
    schema = Schema(key=int, val=None)
    tables = [to_table([(i * 8 + r, None, 0, 1) for i in range(1000)], schema) for r in range(8)]
    merge, at = Merge(8, schema), [0] * 8
    while not merge.done:
        for run in merge.needs():
            piece = tables[run].slice(at[run], 50)
            merge.push(run, piece if piece.num_rows else None)
            at[run] += 50
        assert merge.rows_held <= 8 * 75
        merge.pop()


def test_a_merge_goes_on_where_a_run_is_one_long_group() -> None:
    """Sums beyond 64 bits stay side by side: a run may be equal rows, slab after slab."""
    schema = Schema(key=int, val=None)
    equal = to_table([(1, None, 0, 2**63 - 1)] * 20, schema)
    other = to_table([(1, None, 0, -1), (2, None, 0, 1)], schema)
    merge, left, out = Merge(2, schema), [[equal.slice(i, 2) for i in range(0, 20, 2)], [other]], []
    for _ in range(100):
        if merge.done:
            break
        for run in merge.needs():
            merge.push(run, left[run].pop(0) if left[run] else None)
        out.append(merge.pop())
    rows = Updates(pa.concat_tables(out), schema).rows()
    assert sum(r.diff for r in rows) == 20 * (2**63 - 1) and len(rows) == 21


@settings(max_examples=60)
@given(oracle.rows_of(oracle.CASES["bytes-str"]))
def test_tiny_is_the_general_way(rows: list[Any]) -> None:
    schema = Schema(key=bytes, val=str)
    found = tiny(rows, schema)
    want = consolidate.sort_and_consolidate(to_table(rows, schema))
    if found is None:
        sums = oracle.consolidated(rows)
        assert not rows or len({r[:3] for r in sums}) < len(sums)
    else:
        assert pa.Table.from_batches([found.batch]).equals(want)
        assert (found.least_time, found.greatest_time) == (min(r[2] for r in rows), max(r[2] for r in rows))


FORMS = {
    "table": lambda table: table,
    "batch": lambda table: table.combine_chunks().to_batches()[0],
    "chunks": lambda table: pa.concat_tables([table.slice(0, 1), table.slice(1)]),
    "slice": lambda table: pa.concat_tables([table, table]).combine_chunks().slice(table.num_rows),
    "other order": lambda table: table.select(["diff", "val", "key", "time"]),
    "large text": lambda table: table.cast(_with(table.schema, pa.large_binary(), pa.large_string())),
    "views": lambda table: table.cast(_with(table.schema, pa.binary_view(), pa.string_view())),
    "polars": pl.from_arrow,
}


def _with(schema: pa.Schema, key: pa.DataType, val: pa.DataType) -> pa.Schema:
    return schema.set(0, pa.field("key", key)).set(1, pa.field("val", val))


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=25)
@given(rows=oracle.rows_of(oracle.CASES["bytes-str"]))
def test_a_tiny_table_is_the_general_way(form: str, rows: list[Any]) -> None:
    schema = Schema(key=bytes, val=str)
    as_rows = tiny(rows, schema)
    if as_rows is not None:
        assert tiny(FORMS[form](to_table(rows, schema)), schema) == as_rows


def test_tables_that_are_not_tiny() -> None:
    """Goal: what is large, null, unsound or of another kind goes the general way, which says so."""
    schema = Schema(key=int, val=str)
    rows = pa.table({"key": [1, 2], "val": ["a", "b"], "time": [0, 0], "diff": [1, 1]})
    assert tiny(rows, schema) is not None
    unsound = pa.StringArray.from_buffers(
        2, pa.array([0, 1, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xffa")
    )
    back = pa.StringArray.from_buffers(2, pa.array([0, 9, 2], pa.int32()).buffers()[1], pa.py_buffer(b"ab"))
    columns = {
        "key": ([1, None], [1.0, 2.0], pa.array([1, 2**63], pa.uint64())),
        "val": (["a", None], [b"a", b"b"], pa.array(["a", "a"]).dictionary_encode(), unsound, back),
        "time": ([0, -1], [None, 0]),
        "diff": ([1, None], ["1", "1"]),
    }
    for name, others in columns.items():
        for other in others:
            changed = rows.set_column(rows.column_names.index(name), name, pa.chunked_array([other]))
            assert tiny(changed, schema) is None, (name, other)
    assert tiny(rows.drop_columns(["diff"]), schema) is None
    assert tiny(rows.append_column("more", rows["key"]), schema) is None
    assert tiny(rows.append_column("key", rows["key"]), schema) is None
    assert tiny(pa.concat_tables([rows] * (TINY_ROWS // 2 + 1)), schema) is None
    assert tiny(rows.slice(0, 0), schema) is None
    large = rows.set_column(1, "val", pa.chunked_array([["x" * TINY_BYTES, "xy"]]))
    assert tiny(large, schema) is None
    assert tiny(large.slice(1), schema) is not None
    assert tiny(large.to_reader(), schema) is None, "it can be read once"


@cases
def test_goodbytes_add_up_and_cuts_are_within(case: oracle.Case) -> None:
    schema = schema_of(case)

    @settings(max_examples=15)
    @given(oracle.rows_of(case), st.integers(1, 400))
    def check(rows: list[Any], target: int) -> None:
        table = to_table(rows, schema)
        pieces = list(sizes.cut(table, target))
        assert sum(p.num_rows for p in pieces) == table.num_rows
        assert sum(map(sizes.goodbytes, pieces)) == sizes.goodbytes(table)
        assert all(p.num_rows == 1 or sizes.goodbytes(p) <= target for p in pieces)
        assert all(sizes.goodbytes(a) + sizes.goodbytes(b.slice(0, 1)) > target for a, b in pairwise(pieces))

    check()


def test_goodbytes_are_the_bytes_of_values() -> None:
    schema = Schema(key=bytes, val=list[str])
    table = to_table([(b"abc", ["de", "f"], 0, 1), (b"", [], 0, 1)], schema)
    assert sizes.payload_bytes(table) == 6
    assert sizes.goodbytes(table) == 6 + 2 * 16
    assert sizes.payload_bytes(table.slice(1)) == 0
