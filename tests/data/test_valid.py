"""Goal: unsound Arrow data, which Arrow itself does not notice, is refused where it comes in, with its
row; data that is taken can be stored in each form, compacted and read again, whatever its values."""

import asyncio
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import aiopersist as ap
from aiopersist.base.errors import InvalidUpdate, Unsupported
from aiopersist.base.frontier import Antichain, Description
from aiopersist.base.settings import Settings
from aiopersist.data.part.inline import decode_inline, encode_inline
from aiopersist.data.part.part import PartWriter, decode_part
from aiopersist.data.part.select import prune
from aiopersist.data.part.stats import decode_key_lower, decode_stats
from aiopersist.data.types.codec import DEPTH_MAX
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.consolidate import contents, sort_and_consolidate
from aiopersist.data.updates.convert import to_table
from aiopersist.data.updates.updates import Updates
from aiopersist.spark.rows import Layout
from tests.data.arrow_fuzz import Fuzz, plain

WHOLE = Description(Antichain(0), Antichain(), Antichain(0))


TEXT = pa.string()


def buffers(t: pa.DataType, n: int, *given: bytes | None, children: Any = None) -> pa.Array:
    return pa.Array.from_buffers(
        t, n, [b if b is None else pa.py_buffer(b) for b in given], children=children
    )


def texts(t: pa.DataType = TEXT, code: str = "i", *, bad: int = 5, n: int = 9) -> pa.Array:
    """Texts of one byte, of which one is none."""
    data = b"".join(b"\xff" if row == bad else b"a" for row in range(n))
    return buffers(t, n, None, struct.pack(f"<{n + 1}{code}", *range(n + 1)), data)


def ints(t: pa.DataType, *values: int) -> pa.Array:
    width = t.bit_width // 8
    return buffers(t, len(values), None, b"".join(v.to_bytes(width, "little", signed=True) for v in values))


def in_pairs(elements: pa.Array, kind: Any = pa.ListArray) -> pa.Array:
    n = len(elements) // 2 * 2
    return kind.from_arrays(pa.array(range(0, n + 1, 2), pa.int32()), elements)


STRUCT = pa.StructArray.from_arrays([pa.array(range(9)), texts()], ["n", "t"])
ALL_NULL = pa.Array.from_buffers(
    pa.struct([pa.field("t", pa.string())]), 9, [pa.py_buffer(b"\0\0")], children=[texts()]
)
POISON: list[tuple[str, Any, pa.Array, int]] = [
    ("text", str, texts(), 5),
    ("large text", str, texts(pa.large_string(), "q"), 5),
    ("large text, stored", pa.large_string(), texts(pa.large_string(), "q"), 5),
    ("view", str, buffers(pa.string_view(), 1, None, struct.pack("<i5s7x", 5, b"\xff" * 5)), 0),
    ("dictionary", str, pa.DictionaryArray.from_arrays(pa.array([0, 1, 5, 2], pa.int8()), texts()), 2),
    ("index", str, pa.DictionaryArray.from_arrays(pa.array([0, 9]), pa.array(["a"]), safe=False), 1),
    ("run", str, buffers(pa.run_end_encoded(pa.int32(), pa.string()), 9, None,
                         children=[pa.array([2, 4, 9], pa.int32()), texts(bad=1, n=3)]), 2),
    ("decimal", Decimal, ints(pa.decimal128(38, 9), 1, 10**38), 1),
    ("decimal, wide", Decimal, ints(pa.decimal256(38, 9), 1, -(10**38)), 1),
    ("time s", pa.time32("s"), ints(pa.time32("s"), 86399, 86400), 1),
    ("time ms", pa.time32("ms"), ints(pa.time32("ms"), 0, 0, -1), 2),
    ("time us", pa.time64("us"), ints(pa.time64("us"), 86400 * 10**6), 0),
    ("time ns as us", pa.time64("us"), ints(pa.time64("ns"), 0, 86400 * 10**9), 1),
    ("date64", pa.date32(), ints(pa.date64(), 0, 5), 1),
    ("timestamp s", pa.timestamp("s"), ints(pa.timestamp("s"), 0, 2**60), 1),
    ("timestamp s as us", pa.timestamp("us"), ints(pa.timestamp("s"), 0, 2**50), 1),
    ("duration s", pa.duration("s"), ints(pa.duration("s"), 0, -(2**60)), 1),
    ("struct", STRUCT.type, STRUCT, 5),
    ("struct, sliced", STRUCT.type, STRUCT.slice(3), 2),
    ("beneath null", pa.field("val", ALL_NULL.type), ALL_NULL, 5),
    ("list", list[str], in_pairs(texts()), 2),
    ("list, sliced", list[str], in_pairs(texts()).slice(1), 1),
    ("list of struct", pa.list_(STRUCT.type), in_pairs(STRUCT), 2),
    ("large list", list[str], in_pairs(texts(), pa.LargeListArray), 2),
    ("list view", list[str], pa.ListViewArray.from_arrays(
        pa.array([7, 4, 0], pa.int32()), pa.array([2, 2, 2], pa.int32()), texts()), 1),
    ("fixed list", list[str], pa.FixedSizeListArray.from_arrays(texts(n=8), 2), 2),
]  # fmt: skip
NO_OFFSETS = [
    buffers(pa.string(), 3, None, struct.pack("<4i", 0, 9, 3, 4), b"a" * 11),
    buffers(pa.list_(pa.int64()), 3, None, struct.pack("<4i", 0, 9, 3, 4), children=[pa.array(range(20))]),
    buffers(pa.list_(pa.int64()), 3, None, struct.pack("<4i", 0, 2, -3, 4), children=[pa.array(range(20))]),
]
IDS = [case[0] for case in POISON]


def updates(val: Any, key: Any = None) -> pa.Table:
    n = len(val)
    key = pa.array(range(n)) if key is None else key
    return pa.table({"key": key, "val": val, "time": pa.nulls(n, pa.int64()).fill_null(0), "diff": [1] * n})


@pytest.mark.parametrize(("val", "array", "row"), [case[1:] for case in POISON], ids=IDS)
def test_what_is_not_sound_is_refused_with_its_row(val: Any, array: pa.Array, row: int) -> None:
    """Goal: as key and as val, in one table, in chunks and in batches; rows count over the whole input."""
    table = updates(array)
    for given in (table, table.to_reader(2), pa.concat_tables([table.slice(0, 1), table.slice(1)])):
        with pytest.raises(InvalidUpdate, match="val") as e:
            to_table(given, Schema(key=int, val=val), row_base=100)
        assert e.value.row == 100 + row
    as_key = table.rename_columns(["val", "key", "time", "diff"])
    with pytest.raises(InvalidUpdate, match="key") as e:
        to_table(as_key, Schema(key=val, val=int))
    assert e.value.row == row


@pytest.mark.parametrize("array", NO_OFFSETS, ids=lambda array: str(array.type))
def test_offsets_that_go_back_are_refused(array: pa.Array) -> None:
    table = updates(array)
    for given in (table, table.to_reader(2), table.slice(1), table.slice(1, 1)):
        with pytest.raises(InvalidUpdate, match=r"val|Column 1"):
            to_table(given, Schema(key=int, val=array.type))


def test_flat_columns_are_looked_at_too() -> None:
    flat = pa.table({"key": range(9), "n": range(9), "t": texts(), "time": [0] * 9, "diff": [1] * 9})
    with pytest.raises(InvalidUpdate, match="t: ") as e:
        to_table(flat, Schema(key=int, val=pa.schema([("n", pa.int64()), ("t", pa.string())])))
    assert e.value.row == 5


def test_rows_outside_of_a_slice_do_not_matter() -> None:
    """Goal: nor are they looked at again for each batch that a table is cut into."""
    for array in (texts(), STRUCT, in_pairs(STRUCT)):
        bad = next(c[3] for c in POISON if c[2].type == array.type and c[2].offset == 0)
        for sound in (array.slice(0, bad), array.slice(bad + 1)):
            field = pa.field("val", array.type)
            assert to_table(updates(sound), Schema(key=int, val=field)).num_rows == len(sound)


def test_batches_of_spark_are_looked_at_too() -> None:
    """Goal: a binary column cast to text in Spark is not UTF-8; the column is told as Spark names it."""
    schema: Schema[Any, Any, Any] = Schema(key=int, val=pa.schema([("t", pa.string())]))
    batch = pa.record_batch({"key": pa.array(range(9)), "t": texts()})
    with pytest.raises(InvalidUpdate, match="column 't'") as e:
        Layout(batch.schema, schema).updates(batch)
    assert e.value.row == 5


class Careless(ap.Codec):
    name = "careless"
    arrow_type = pa.string()

    def encode(self, values: Any) -> pa.Array:
        return texts(bad=values.index("bad") if "bad" in values else -1, n=len(values))

    def decode(self, array: pa.Array) -> list[Any]:
        return list(array.to_pylist())


def test_the_arrays_of_own_codecs_are_looked_at_too() -> None:
    schema: Schema[Any, Any, Any] = Schema(key=int, val=Careless())
    assert to_table([(1, "good", 0, 1)], schema).num_rows == 1
    with pytest.raises(InvalidUpdate, match="codec careless") as e:
        to_table([(1, "good", 0, 1), (2, "bad", 0, 1), (3, "good", 0, 1)], schema)
    assert e.value.row == 1


@pytest.mark.parametrize("t", [pa.decimal128(5, -2), pa.decimal128(5, 7), pa.binary(0)], ids=str)
def test_types_that_no_part_can_have_are_refused(t: pa.DataType) -> None:
    for val in (t, pa.struct([("a", pa.list_(t))])):
        with pytest.raises(TypeError, match="cannot store"):
            Schema(key=int, val=val)


DEEPER: dict[str, Any] = {
    "list": (pa.list_, lambda value: [value]),
    "struct": (lambda t: pa.struct([("a", t)]), lambda value: {"a": value}),
}


@pytest.mark.parametrize("kind", DEEPER)
def test_types_that_are_too_deep_are_refused(kind: str) -> None:
    """Goal: no reader of Parquet takes them, nor any of messages; those that are taken live."""
    wrap, around = DEEPER[kind]
    t, value = pa.int64(), 5
    for _ in range(DEPTH_MAX):
        t, value = wrap(t), around(value)
    schema: Schema[Any, Any, Any] = Schema(key=int, val=t)
    table = sort_and_consolidate(to_table([(i, value, 0, 1) for i in range(30)], schema))
    part = PartWriter(schema, WHOLE).whole(table, 200)
    assert decode_part(bytes(part.data), part, schema).equals(table)
    assert decode_inline(encode_inline(table), schema, None).equals(table)
    with pytest.raises(TypeError, match="more than 32 lists and structs within each other"):
        Schema(key=int, val=wrap(t))


def test_names_of_fields_that_polars_would_cut_are_refused() -> None:
    """Goal: it sorts larger tables, and gave them back with other names, which no compaction could take."""
    for val in (struct_of := pa.struct([("a\0b", pa.int64())]), pa.list_(struct_of)):
        with pytest.raises(TypeError, match=r"a field with the name 'a\\x00b'"):
            Schema(key=int, val=val)


# --- whatever bytes come ---------------------------------------------------------------------------


def random_updates(seed: int) -> tuple[Schema[Any, Any, Any], pa.Table] | None:
    """`None` where Arrow itself would not make such an array."""
    fuzz = Fuzz(seed)
    n = fuzz.rng.choice([1, 3, 30, 100])
    fields = [fuzz.field(name) for name in ("key", "val")]
    try:
        key, val = (fuzz.array(f.type, n, nulls=f.nullable) for f in fields)
        return Schema(*fields), updates(val, key)
    except pa.ArrowException:  # Arrow itself refuses to make it
        return None


def survives(schema: Schema[Any, Any, Any], given: pa.Table) -> bool:
    """Whether it is taken; then it can be stored and read in every way, and is the same."""
    try:
        table = to_table(given, schema)
    except InvalidUpdate as refused:
        return _refused_rightly(refused, schema, given)
    table = sort_and_consolidate(table)
    if not table.num_rows:
        return True
    rows = plain(table)
    assert plain(decode_inline(encode_inline(table), schema, None)) == rows
    part = PartWriter(schema, WHOLE).whole(table, 200)
    assert plain(decode_part(bytes(part.data), part, schema)) == rows
    assert part.stats is not None
    decode_stats(part.stats, schema)
    decode_key_lower(part.key_lower, schema)
    assert prune(pa.compute.field("time") >= 0, [part.stats], schema) == [True]
    times = 10_000 // table.num_rows  # as large tables are sorted
    diffs = [diff * times for diff in contents(table, schema)["diff"].to_pylist()]
    many = contents(pa.concat_tables([table] * times).combine_chunks(), schema)
    assert many["diff"].to_pylist() == diffs
    assert plain(many.select(["key", "val"])) == plain(contents(table, schema).select(["key", "val"]))
    try:
        Updates(table, schema).rows()
    except Unsupported:
        pass
    return True


def _refused_rightly(refused: InvalidUpdate, schema: Schema[Any, Any, Any], given: pa.Table) -> bool:
    """The row it tells is at fault. `False`."""
    if refused.row is not None:
        with pytest.raises(InvalidUpdate):
            to_table(given.slice(refused.row, 1), schema)
    return False


def fuzzed(seeds: range) -> None:
    taken = sum(survives(*found) for seed in seeds if (found := random_updates(seed)) is not None)
    assert len(seeds) / 5 < taken < len(seeds)


def test_what_is_taken_can_be_stored_and_read() -> None:
    fuzzed(range(60))


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("start", range(1000, 21_000, 5000))
def test_what_is_taken_can_be_stored_and_read_at_length(start: int) -> None:
    fuzzed(range(start, start + 5000))


async def lives(seed: int) -> None:
    """A shard takes random updates or refuses them, and goes on either way: inline, in blobs, compacted."""
    if (found := random_updates(seed)) is None:
        return
    schema, given = found
    small = Settings(inline_writes_single_max_bytes=(0, 16384)[seed % 2], row_group_bytes=500)
    async with ap.open("mem://", settings=small, maintenance=False) as client:
        async with client.writer("s", schema) as w:
            try:
                await w.compare_and_append(given, 0, 1)
            except InvalidUpdate:
                assert w.upper == Antichain(0)
                given = given.slice(0, 0)
                await w.compare_and_append([], 0, 1)
            want = plain(contents(to_table(given, schema), schema))
            later = given.set_column(2, "time", pa.array([1] * given.num_rows, pa.int64()))
            await w.compare_and_append(later, 1, 2)
            async with client.reader("s") as r:
                async with r.snapshot(0) as s:
                    assert plain(await s.to_arrow()) == want
                    await s.stats()
                await client.admin.force_compaction("s")
                async with r.snapshot(1) as s:
                    assert [(*row[:-1], row[-1] // 2) for row in plain(await s.to_arrow())] == want
                    batches = [batch async for batch in s.batches()]
                    assert sum(batch.num_rows for batch in batches) == len(want)
        assert (await client.admin.fsck("s")).ok


async def test_a_shard_goes_on_whatever_it_is_given() -> None:
    for seed in range(500, 540):
        await lives(seed)


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_shard_goes_on_whatever_it_is_given_at_length() -> None:
    for seed in range(30_000, 32_000):
        async with asyncio.timeout(60):
            await lives(seed)
