"""Parts: the written bytes are read, other bytes are `Corruption`, and bounds hold."""

import json
import subprocess
import sys
from decimal import Decimal
from io import BytesIO
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from aiopersist.base.errors import Corruption, Unsupported
from aiopersist.base.frontier import Antichain, Description
from aiopersist.base.settings import UntrimmableColumns
from aiopersist.data.part import stats
from aiopersist.data.part.inline import checksum, decode_inline, encode_inline
from aiopersist.data.part.part import (
    EncodedPart,
    PartWriter,
    StatsSpec,
    decode_part,
    plan_ranges,
    read_footer,
    read_row_groups,
)
from aiopersist.data.part.select import prune
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.consolidate import sort_and_consolidate
from aiopersist.data.updates.convert import to_table
from aiopersist.data.updates.updates import Updates
from tests.data import data_oracle as oracle
from tests.data.data_oracle import cases, schema_of

DESCRIPTION = Description(Antichain(0), Antichain(), Antichain(3))
PLAIN = Schema(key=bytes, val=str)


class Ref(NamedTuple):
    size: int
    footer_bytes: int
    checksum: str


def encode(
    table: pa.Table, schema: Schema[Any, Any, Any], row_group_bytes: int = 10**6, **spec: Any
) -> EncodedPart:
    return PartWriter(schema, DESCRIPTION, StatsSpec(**spec)).whole(table, row_group_bytes)


def plain_part(rows: int = 100, row_group_bytes: int = 400, first: int = 0) -> EncodedPart:
    updates = [(b"%06d" % i, f"v{i % 3}", i, 1) for i in range(first, first + rows)]
    return encode(to_table(updates, PLAIN), PLAIN, row_group_bytes)


@cases
def test_parts_come_back(case: oracle.Case) -> None:
    schema = schema_of(case)

    @settings(max_examples=15)
    @given(oracle.rows_of(case), st.integers(1, 500))
    def check(rows: list[Any], row_group_bytes: int) -> None:
        table = sort_and_consolidate(to_table(rows, schema))
        data = encode_inline(table)
        inline = decode_inline(data, schema, checksum(data))
        assert inline.schema.equals(schema.arrow_schema)
        want = oracle.consolidated(rows)
        assert oracle.plain(Updates(inline, schema).rows()) == want
        if not table.num_rows:
            return
        part = encode(table, schema, row_group_bytes)
        read = decode_part(part.data, part, schema)
        assert read.schema.equals(schema.arrow_schema, check_metadata=True)
        assert oracle.plain(Updates(read, schema).rows()) == want
        assert (part.rows, part.size) == (len(want), len(part.data))

    check()


def test_any_parquet_reader_opens_a_part() -> None:
    part = plain_part()
    table = pq.read_table(BytesIO(part.data))
    assert table.column_names == ["key", "val", "time", "diff"] and table.num_rows == 100
    assert pq.ParquetFile(BytesIO(part.data)).metadata.num_row_groups == part.row_groups > 3


def test_ranges_are_read_alone() -> None:
    part = plain_part()
    index = read_footer(part.data[-part.footer_bytes :], part)
    assert (index.lower, index.since, index.rows) == (Antichain(0), Antichain(3), 100)
    chosen = [1, 2, 5]
    plan = plan_ranges(index, chosen, gap_bytes=0, range_bytes_max=10**9)
    assert len(plan) == 2
    fetched = [(offset, part.data[offset : offset + length]) for offset, length in plan]
    got = read_row_groups(index, fetched, chosen, PLAIN)
    whole = decode_part(part.data, part, PLAIN)
    starts = [sum(g.rows for g in index.row_groups[:n]) for n in chosen]
    want = pa.concat_tables(
        [whole.slice(s, index.row_groups[n].rows) for s, n in zip(starts, chosen, strict=True)]
    )
    assert got.equals(want)
    with pytest.raises(Corruption):
        read_row_groups(index, fetched, [3], PLAIN)


def test_near_ranges_are_one_request() -> None:
    part = plain_part()
    index = read_footer(part.data[-part.footer_bytes :], part)
    groups, everything = index.row_groups, range(len(index.row_groups))
    end = sum(g.length for g in groups)
    assert plan_ranges(index, everything, gap_bytes=0, range_bytes_max=10**9) == [(0, end)]
    assert plan_ranges(index, [0, 2], gap_bytes=10**6, range_bytes_max=10**9)[0] == (
        0,
        groups[2].offset + groups[2].length,
    )
    single = [(g.offset, g.length) for g in groups]
    assert plan_ranges(index, everything, gap_bytes=0, range_bytes_max=1) == single
    assert end + part.footer_bytes == part.size


def test_every_damaged_byte_is_found() -> None:
    part = plain_part(rows=40, row_group_bytes=300)
    ref = Ref(part.size, part.footer_bytes, part.checksum)
    for at in range(part.size):
        data = bytearray(part.data)
        data[at] ^= 1 << at % 8
        with pytest.raises(Corruption):
            decode_part(bytes(data), ref, PLAIN)


def test_another_valid_part_is_not_ours() -> None:
    ours, other = plain_part(), plain_part(first=1)
    for ref in (
        ours,
        Ref(other.size, ours.footer_bytes, ours.checksum),
        Ref(other.size, other.footer_bytes, ours.checksum),
    ):
        with pytest.raises(Corruption):
            decode_part(other.data, ref, PLAIN)
    for data in (
        bytes(ours.data[:-1]),
        bytes(ours.data) + b"x",
        b"",
        bytes(other.data[: -other.footer_bytes]) + bytes(ours.data[-ours.footer_bytes :]),
    ):
        with pytest.raises(Corruption):
            decode_part(data, ours, PLAIN)
    index = read_footer(ours.data[-ours.footer_bytes :], ours)
    group = index.row_groups[0]
    with pytest.raises(Corruption):
        read_row_groups(index, [(0, other.data[: group.length])], [0], PLAIN)
    assert read_row_groups(index, [(0, ours.data[: group.length])], [0], PLAIN).num_rows == group.rows


def test_a_later_format_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiopersist.data.part.part.FORMAT", 2)
    part = plain_part()
    monkeypatch.undo()
    with pytest.raises(Unsupported, match="format 2"):
        decode_part(part.data, part, PLAIN)


def test_foreign_parquet_and_another_schema_are_corruption() -> None:
    sink = BytesIO()
    pq.write_table(to_table([(b"a", "b", 0, 1)], PLAIN), sink)
    data = sink.getvalue()
    for length in (100, len(data)):
        with pytest.raises(Corruption):
            decode_part(data, Ref(len(data), length, checksum(data[-length:])), PLAIN)
    part = plain_part()
    with pytest.raises(Corruption):
        decode_part(part.data, part, Schema(key=bytes, val=int))


def test_damaged_inline_parts_are_found() -> None:
    data = encode_inline(to_table([(b"a", "b", 0, 1), (b"b", "c", 1, 1)], PLAIN))
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        with pytest.raises(Corruption):
            decode_inline(bytes(damaged), PLAIN, checksum(data))
    for garbage in (b"", b"garbage", data[:20]):
        with pytest.raises(Corruption):
            decode_inline(garbage, PLAIN, None)


def leaf_values(name: str, rows: list[Any]) -> list[Any]:
    """The values of a leaf, by plain attribute access."""
    side, *path = name.split(".")
    values = [getattr(row, side) for row in rows]
    for step in path:
        values = [
            None if v is None else v[int(step)] if isinstance(v, tuple) else getattr(v, step) for v in values
        ]
    return values


@cases
def test_statistics_bound(case: oracle.Case) -> None:
    schema = schema_of(case)

    @settings(max_examples=20)
    @given(oracle.rows_of(case, oracle.small_diffs), st.integers(1, 300))
    def check(rows: list[Any], row_group_bytes: int) -> None:
        table = sort_and_consolidate(to_table(rows, schema))
        if not table.num_rows:
            return
        kept = Updates(table, schema).rows()
        part = encode(table, schema, row_group_bytes, budget_bytes=10**6)
        assert part.stats is not None
        found = stats.decode_stats(json.loads(json.dumps(part.stats)), schema)
        assert found.keys() == stats.leaf_types(schema).keys()
        for name, column in found.items():
            values = leaf_values(name, kept)
            present = [oracle.rank(v) for v in values if v is not None]
            assert column.null_count == values.count(None)
            nested = isinstance(next((v for v in values if v is not None), None), list)
            if not present or nested:
                assert column.min is None and column.max is None
                continue
            assert oracle.rank(column.min) <= min(present)
            if column.max is not None:
                assert oracle.rank(column.max) >= max(present)
            if max(len(str(v)) for v in values) < 250:
                assert (oracle.rank(column.min), oracle.rank(column.max)) == (min(present), max(present))
        lower = stats.decode_key_lower(json.loads(json.dumps(part.key_lower)), schema)
        assert oracle.rank(lower) <= oracle.rank(kept[0].key)
        assert type(lower) is type(kept[0].key)

    check()


@pytest.mark.parametrize(
    ("val", "least", "greatest"),
    [
        (b"a" * 300, b"a" * 256, b"a" * 255 + b"b"),
        (b"a" * 200 + b"\xff" * 100, b"a" * 200 + b"\xff" * 56, b"a" * 199 + b"b"),
        (b"\xff" * 300, b"\xff" * 256, None),
        (b"\xff" * 256, b"\xff" * 256, b"\xff" * 256),
        ("a" * 300, "a" * 256, "a" * 255 + "b"),
        ("é" * 200, "é" * 128, "é" * 127 + "ê"),
        ("a" + "é" * 200, "a" + "é" * 127, "a" + "é" * 126 + "ê"),
        ("a\U0010ffff" + "\U0010ffff" * 100, "a" + "\U0010ffff" * 63, "b"),
        ("\U0010ffff" * 100, "\U0010ffff" * 64, None),
        ("\ud7ff" * 100, "\ud7ff" * 85, "\ud7ff" * 84 + "\ue000"),
    ],
)
def test_long_bounds_are_cut_and_still_bound(val: Any, least: Any, greatest: Any) -> None:
    schema = Schema(key=type(val), val=None)
    part = encode(to_table([(val, None, 0, 1)], schema), schema, budget_bytes=10**4)
    assert part.stats is not None
    bounds = stats.decode_stats(part.stats, schema)["key"]
    assert (bounds.min, bounds.max) == (least, greatest)
    assert stats.decode_key_lower(part.key_lower, schema) == least


class Wide(BaseModel):
    amount: int
    note: str = "n" * 250
    ERR_code: str = "e" * 250
    price: Decimal = Decimal(1)


def test_statistics_are_trimmed_by_whole_columns() -> None:
    schema = Schema(key=int, val=Wide)
    table = to_table([(1, Wide(amount=1), 0, 1)], schema)

    def names(**spec: Any) -> set[str]:
        found = encode(table, schema, **spec).stats
        assert found is not None
        return set(found)

    everything = {"key", "time", "diff", "val.amount", "val.note", "val.ERR_code", "val.price"}
    assert names(budget_bytes=10**5) == everything
    assert names(budget_bytes=300) == {"key", "time", "diff", "val.amount", "val.price"}
    assert names(budget_bytes=0) == set()
    assert names(budget_bytes=0, untrimmable=UntrimmableColumns(prefixes=("err_",))) == {"val.ERR_code"}
    assert names(budget_bytes=0, untrimmable=UntrimmableColumns(equals=("amount",), suffixes=("ote",))) == {
        "val.amount",
        "val.note",
    }
    assert encode(table, schema, enabled=False).stats is None
    trimmed = encode(table, schema, budget_bytes=600).stats
    assert len(json.dumps(trimmed, separators=(",", ":"))) <= 600 + 2


CONDITIONS: list[Any] = [
    lambda f, v: f == v,
    lambda f, v: f < v,
    lambda f, v: f >= v,
    lambda f, v: f != v,
    lambda f, v: ~(f <= v),
    lambda f, v: f.is_null(),
    lambda f, v: f.is_valid(),
    lambda f, v: f.isin([v.as_py()]),
    lambda f, v: (f > v) | f.is_null(),
]


@pytest.mark.parametrize("condition", range(len(CONDITIONS)))
@pytest.mark.parametrize("name", ["key", "val", "val.score", "score", "val.text"])
def test_pruning_is_never_wrong(name: str, condition: int) -> None:
    """Whatever has a row that matches is read."""
    model = "." in name or name == "score"
    case = oracle.CASES["optional model" if model else "float-optional float"]
    schema = schema_of(case)
    path = name.split(".")
    values = oracle.texts if name == "val.text" else oracle.floats

    @settings(max_examples=8)
    @given(st.lists(oracle.rows_of(case, oracle.small_diffs, max_size=4), min_size=1, max_size=4), values)
    def check(pieces: list[Any], value: Any) -> None:
        tables = [sort_and_consolidate(to_table(rows, schema)) for rows in pieces]
        records = [json.loads(json.dumps(stats.collect(t))) for t in tables]
        where = CONDITIONS[condition](pc.field(*path), pa.scalar(value))
        kept = prune(where, records, schema)
        bare = pc.field(*(("val", "score") if name == "score" else path))
        for table, keep in zip(tables, kept, strict=True):
            if table.filter(CONDITIONS[condition](bare, pa.scalar(value))).num_rows:
                assert keep

    check()


def test_pruning_prunes() -> None:
    part = plain_part()
    index = read_footer(part.data[-part.footer_bytes :], part)
    kept = prune(pc.field("key") == b"000042", [g.stats for g in index.row_groups], PLAIN)
    assert sum(kept) == 1
    assert prune(pc.field("key") == b"x", [part.stats, None, {}], PLAIN) == [False, True, True]


def test_bounds_of_the_whole_are_those_of_its_pieces() -> None:
    schema = Schema(key=float, val=str | None)
    rows = [[(float("nan"), None, 0, 1)], [(1.0, "b", 1, 1)], [(-1.0, "\U0010ffff" * 100, 2, 1)]]
    records = [stats.collect(to_table(r, schema)) for r in rows]
    found = stats.decode_stats(stats.merge(records, schema), schema)
    assert (found["key"].min, str(found["key"].max)) == (-1.0, "nan")
    assert found["val"] == ("b", None, 1)
    assert found["time"] == (0, 2, 0)


@pytest.mark.slow
def test_a_process_that_ends_right_after_reading_ends_well() -> None:
    """Arrow's threads let go of what they read while the interpreter ends."""
    program = """
from aiopersist import Antichain, Description, Schema
from aiopersist.data.updates.consolidate import sort_and_consolidate
from aiopersist.data.updates.convert import to_table
from aiopersist.data.part.part import decode_part, PartWriter

schema = Schema(key=int, val=bytes)
table = sort_and_consolidate(to_table([(i, b"x" * 64, 0, 1) for i in range(100_000)], schema))
description = Description(Antichain(0), Antichain(), Antichain(0))
part = PartWriter(schema, description).whole(table, 1 << 20)
assert decode_part(part.data, part, schema).num_rows == table.num_rows
"""
    for _ in range(2):
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
