"""Goal: points in time that Arrow has and Python has not are stored, compacted, pruned by and read as
Arrow data like any other; only a read as Python values is refused. And fields with dots in their names are
told apart, or not pruned by."""

import datetime as dt
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import aiopersist as ap
from aiopersist.base.errors import DiffOverflow, InvalidUpdate, Unsupported
from aiopersist.base.frontier import Antichain, Description
from aiopersist.data.jsonable import scalar_from_json
from aiopersist.data.part import part
from aiopersist.data.part.key_range import bounds_of, condition, leaves, plan_key_ranges
from aiopersist.data.part.layout import layout
from aiopersist.data.part.select import apply_where, resolve_columns
from aiopersist.data.part.stats import collect, decode_key_lower, decode_stats, key_lower, leaf_types, merge
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.convert import to_table
from aiopersist.data.updates.order import row_keys

FAR = {
    "timestamp": (pa.timestamp("us", "UTC"), [-(2**56), 0, 2**62]),
    "naive": (pa.timestamp("ms"), [-(2**62), 0, 2**62]),
    "date": (pa.date32(), [-(2**30), 0, 2**30]),
    "duration": (pa.duration("ms"), [-(2**62), 0, 2**62]),
}


def column(t: pa.DataType, values: list[int]) -> pa.Array:
    return pa.array(values, pa.int32() if t.bit_width == 32 else pa.int64()).cast(t)


def table(t: pa.DataType, values: list[int], time: int = 0) -> pa.Table:
    n = len(values)
    far = column(t, values)
    return pa.table({"key": far, "val": far, "time": pa.array([time] * n, pa.int64()), "diff": [1] * n})


@pytest.mark.parametrize(("t", "values"), FAR.values(), ids=FAR)
async def test_a_shard_with_far_values_lives(t: pa.DataType, values: list[int]) -> None:
    settings = ap.Settings(inline_writes_total_max_bytes=8 * 1024, row_group_bytes=200)
    async with ap.open("mem://", settings=settings, maintenance=False) as client:
        async with client.writer("s", Schema(key=t, val=t)) as w, client.reader("s") as r:
            for time in range(30):
                await w.compare_and_append(table(t, values, time), time, time + 1)
            batch = await w.batch(table(t, values * 2, 30), 30, 31)
            assert [(p.key_lower, p.stats is not None) for p in batch.parts] == [(None, True)]
            await w.compare_and_append_batch([batch], 30, 31)
            for compacted in (False, True):
                async with r.snapshot() as s:
                    found = await s.to_arrow()
                    assert found["key"].combine_chunks().equals(column(t, values))
                    assert found["diff"].to_pylist() == [32] * 3
                    some = await s.to_arrow(where=pc.field("key") == column(t, values)[2])
                    assert some["val"].combine_chunks().equals(column(t, values[2:]))
                    assert not compacted or (await s.stats()).columns["key"].min is None
                    near = pc.field("key") == column(t, [0])[0]
                    assert [diff for _, _, diff in await s.rows(where=near)] == [32]
                    with pytest.raises(Unsupported, match="Arrow"):
                        await s.rows()
                    with pytest.raises(Unsupported, match="Arrow"):
                        async for _ in s:
                            pass
                await client.admin.force_compaction("s")
        assert (await client.admin.fsck("s")).ok


@pytest.mark.parametrize(("t", "values"), FAR.values(), ids=FAR)
def test_bounds_are_integers_all_the_way(t: pa.DataType, values: list[int]) -> None:
    schema: Schema[Any, Any, Any] = Schema(key=t, val=pa.struct([("at", t)]))
    rows = to_table(table(t, values).drop_columns("val").append_column("at", column(t, values)), schema)
    stats = merge([collect(rows.slice(i, 1)) for i in range(3)], schema)
    assert stats["key"] == stats["val.at"] == {"min": values[0], "max": values[2], "nulls": 0}
    assert scalar_from_json(values[2], t).equals(column(t, values)[2])
    shown = decode_stats(collect(rows.slice(1, 1)), schema)["key"]
    assert shown.min == shown.max == column(t, [0])[0].as_py()
    assert decode_key_lower(key_lower(rows), schema) is None
    assert decode_key_lower(key_lower(rows.slice(1)), schema) == column(t, [0])[0].as_py()
    order = leaves(schema)
    blocks = [part_block(rows.slice(i, 1), order) for i in range(3)]
    ranges = plan_key_ranges(blocks, 3)
    assert len(ranges) == 3
    found = [apply_where(rows, condition(keys, order), schema).num_rows for keys in ranges]
    assert found == [1, 1, 1]


def part_block(rows: pa.Table, order: Any) -> Any:
    from aiopersist.data.part.key_range import Block

    return Block(bounds_of(collect(rows), order), rows.num_rows)


def test_errors_about_far_values_name_them() -> None:
    seconds = column(pa.timestamp("s"), [0, 2**50])
    with pytest.raises(InvalidUpdate, match=str(2**50)) as e:
        to_table(pa.table([seconds, [1, 1], [0, 0], [1, 1]], ["key", "val", "time", "diff"]),
                 Schema(key=pa.timestamp("us"), val=int))  # fmt: skip
    assert e.value.row == 1


@pytest.mark.parametrize("t", [pa.timestamp("us", "UTC"), pa.date32()], ids=str)
async def test_a_sum_out_of_range_of_a_far_key_is_told(t: pa.DataType) -> None:
    far = 2 ** (t.bit_width - 2)
    async with ap.open("mem://") as client, client.writer("s", Schema(key=t, val=pa.list_(t))) as w:
        moments = column(t, [far] * 2)
        lists = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), moments)
        names = ["key", "val", "time", "diff"]
        await w.compare_and_append(pa.table([moments, lists, [0, 0], [2**62] * 2], names), 0, 1)
        async with client.reader("s") as r, r.snapshot(0) as s:
            with pytest.raises(DiffOverflow, match=str(far)) as e:
                await s.to_arrow()
            assert (e.value.key, e.value.val) == (far, [far])


def test_statistics_that_cannot_be_computed_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise OverflowError("too large")

    for name in ("collect", "merge", "key_lower"):
        monkeypatch.setattr(part, name, fails)
        schema = Schema(key=int, val=int)
        rows = to_table([(1, 1, 0, 1)], schema)
        whole = Description(Antichain(0), Antichain(), Antichain(0))
        encoded = part.PartWriter(schema, whole).whole(rows, 100)
        assert encoded.stats is None or encoded.key_lower is None
        assert part.decode_part(bytes(encoded.data), encoded, schema).equals(rows)
        monkeypatch.undo()


# --- dots ------------------------------------------------------------------------------------------

A_B = pa.field("a", pa.struct([pa.field("b", pa.int64(), False)]), False)
DOTTED = pa.field("a.b", pa.int64(), False)


@pytest.mark.parametrize("fields", [[A_B, DOTTED], [DOTTED, A_B]], ids=["struct first", "dotted first"])
async def test_fields_with_dots_lose_no_rows(fields: list[pa.Field]) -> None:
    """Goal: a condition on either field gives its rows, with any statistics."""
    settings = ap.Settings(inline_writes_single_max_bytes=0, row_group_bytes=50)
    schema: Schema[Any, Any, Any] = Schema(key=pa.struct(fields), val=pa.struct(fields))
    async with ap.open("mem://", settings=settings) as client:
        async with client.writer("s", schema) as w, client.reader("s", schema) as r:
            rows = [{"a": {"b": i}, "a.b": 1000 + i} for i in range(20)]
            await w.compare_and_append([(row, row, 0, 1) for row in rows], 0, 1)
            async with r.snapshot(0) as s:
                for half in ("key", "val"):
                    inner, outer = pc.field(half, "a", "b") == 5, pc.field(half, "a.b") == 1005
                    for where in (inner, outer, inner & outer):
                        assert [k["a"]["b"] for k, _, _ in await s.rows(where=where)] == [5]
                with pytest.raises(ap.InvalidUsage, match="is ambiguous"):
                    await s.rows(columns=["val.a.b"])
                assert (await s.stats()).columns.keys() == {"time", "diff"}
            async with client.workers.shared_read("s", 0) as shared:
                found = [
                    row["key"]["a"]["b"]
                    for piece in await shared.pieces(4)
                    async for batch in client.workers.read_piece(piece)
                    for row in batch.to_pylist()
                ]
                assert sorted(found) == list(range(20))


def test_a_field_with_dots_that_is_alone_is_pruned_by() -> None:
    schema: Schema[Any, Any, Any] = Schema(key=int, val=pa.struct([DOTTED]))
    assert "val.a.b" in leaf_types(schema)
    assert resolve_columns(["val.a.b", "a.b"], schema) == {"val.a.b": ("val", "a.b"), "a.b": ("val", "a.b")}


def test_columns_with_one_path_in_parquet_have_no_encoding_of_their_own() -> None:
    fields = [A_B, pa.field("a.b", pa.string(), False)]
    schema: Schema[Any, Any, Any] = Schema(key=int, val=pa.struct(fields))
    rows = to_table([(i, {"a": {"b": i}, "a.b": "x"}, 0, 1) for i in range(50)], schema)
    assert "val.a.b" not in {*layout(rows)["use_dictionary"], *layout(rows)["column_encoding"]}
    whole = Description(Antichain(0), Antichain(), Antichain(0))
    encoded = part.PartWriter(schema, whole).whole(rows, 1000)
    assert part.decode_part(bytes(encoded.data), encoded, schema).equals(rows)


def test_moments_that_python_has_are_python_values_still() -> None:
    schema = Schema(key=dt.datetime, val=dt.date)
    row = (dt.datetime(9999, 12, 31, tzinfo=dt.UTC), dt.date(1, 1, 1), 0, 1)
    found = decode_stats(collect(to_table([row], schema)), schema)
    assert (found["key"].min, found["val"].max) == row[:2]


@pytest.mark.parametrize("zone", ["+05:30", "Nowhere/Nothing"])
async def test_lists_of_moments_in_any_zone_are_sorted(zone: str) -> None:
    # polars, which sorts lists, knows zones by their names alone.
    moment = pa.field("at", pa.timestamp("us", zone), nullable=False)
    inner = pa.struct([moment, pa.field("none", pa.null()), pa.field("x", pa.float64())])
    t = pa.list_(pa.field("element", inner, nullable=False))
    n = 40
    moments = pa.array([i * 7 % n - 2**60 for i in range(n)], pa.int64()).view(moment.type)
    floats = pa.array([float("nan"), None] * (n // 2))
    structs = pa.StructArray.from_arrays([moments, pa.nulls(n), floats], fields=list(inner))
    ends = pa.array([0, *range(3, n, 3), n], pa.int32())
    lists = pa.ListArray.from_arrays(ends, structs, type=t)
    rows = pa.concat_arrays([lists.slice(1), lists, lists.slice(3)])
    ones = pa.array([1] * len(rows), pa.int64())
    given = pa.table({"key": rows, "val": rows, "time": ones, "diff": ones})
    async with ap.open("mem://", maintenance=False) as client:
        async with client.writer("s", Schema(key=t, val=t)) as w, client.reader("s") as r:
            await w.compare_and_append(given, 0, 2)
            for _ in range(2):
                async with r.snapshot() as s:
                    found = await s.to_arrow()
                    assert len(found) == len(lists)
                    assert found["diff"].to_pylist().count(3) == len(lists) - 3
                    assert row_keys(found, ["val"]) == sorted(row_keys(given.slice(13, 14), ["val"]))
                assert (await client.admin.fsck("s")).ok
                await client.admin.force_compaction("s")
