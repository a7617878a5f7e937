"""Goal: text and bytes in any encoding of Arrow become the same column; where a column cannot hold them
together, they are refused."""

import mmap
import struct
from random import Random
from types import MappingProxyType
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from aiopersist.base.errors import InvalidUpdate
from aiopersist.data.types.cast import cast_column
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.convert import chunks_of, to_table

TEXTS = [None, "", "a", "é" * 3, "x" * 40, "\0"]
PLAIN = Schema(key=int, val=str)


def encoded(rng: Random, values: list[Any], t: pa.DataType) -> pa.Array:
    """The values as they are, by a dictionary, or in runs."""
    way = rng.randrange(3)
    if way == 0:
        entries = list(dict.fromkeys(values))
        indices = pa.array(map(entries.index, values), rng.choice([pa.int8(), pa.uint16(), pa.int64()]))
        return pa.DictionaryArray.from_arrays(indices, pa.array(entries, t))
    array = pa.array(values, t)
    if way == 1 and values and "view" not in str(t):
        return pc.run_end_encode(array, rng.choice([pa.int16(), pa.int32(), pa.int64()]))
    return array


@pytest.mark.parametrize("seed", range(300))
def test_every_encoding_has_the_same_values(seed: int) -> None:
    rng = Random(seed)
    values: list[Any] = [rng.choice(TEXTS) for _ in range(rng.choice([0, 1, 3, 9, 30]))]
    given = [pa.string(), pa.large_string(), pa.string_view()]
    wanted = given[:2]
    if seed % 2:
        values = [None if value is None else value.encode() for value in values]
        given, wanted = [pa.binary(), pa.large_binary(), pa.binary_view()], [pa.binary(), pa.large_binary()]
    array = encoded(rng, values, rng.choice(given))
    start = rng.randrange(len(values) + 1)
    column = cast_column(array.slice(start), pa.field("key", rng.choice(wanted)))
    column.validate(full=True)
    assert column.to_pylist() == values[start:]


@pytest.mark.parametrize("kind", [pl.Categorical, pl.Enum(["a", "b"])], ids=str)
def test_categories_of_polars(kind: Any) -> None:
    frame = pl.DataFrame({"key": [1, 2], "val": ["b", "a"], "time": [0, 0], "diff": [1, 1]})
    table = to_table(frame.with_columns(pl.col("val").cast(kind)), PLAIN)
    assert table["val"].to_pylist() == ["b", "a"]


def test_a_slice_that_lies_beyond_32_bits() -> None:
    """Its own text is short: it can be cast, though its offsets are large."""
    end = 2**31 + 6
    with mmap.mmap(-1, end) as memory:  # pages that nobody reads take no memory
        memory[end - 6 :] = b"abcdef"
        offsets = pa.py_buffer(struct.pack("<4q", 0, end - 6, end - 4, end))
        array = pa.Array.from_buffers(pa.large_string(), 3, [None, offsets, pa.py_buffer(memory)])
        column = cast_column(array.slice(1), pa.field("val", pa.string()))
        assert column.to_pylist() == ["ab", "cdef"]
        del array, offsets


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("encoding", ["views", "runs", "dictionary"])
def test_a_little_memory_that_stands_for_gigabytes(encoding: str) -> None:
    """Offsets of 32 bits would wrap, and the last rows be those of the beginning."""
    width, rows = 2**16, 2**16 + 100
    texts = pa.array(["x" * width, "y" * width])
    if encoding == "views":
        views = texts.cast(pa.string_view()).buffers()
        x, y = (views[1].to_pybytes()[at : at + 16] for at in (0, 16))
        repeated = pa.py_buffer(x * (rows - 100) + y * 100)
        column = pa.Array.from_buffers(pa.string_view(), rows, [None, repeated, *views[2:]])
    elif encoding == "runs":
        column = pa.RunEndEncodedArray.from_arrays(pa.array([rows - 100, rows], pa.int32()), texts)
    else:
        column = pa.DictionaryArray.from_arrays(pa.array([0] * (rows - 100) + [1] * 100), texts)
    table = pa.table({"key": range(rows), "val": column, "time": [0] * rows, "diff": [1] * rows})
    with pytest.raises(InvalidUpdate, match="too large"):
        to_table(table, PLAIN)
    wide = Schema(key=int, val=pa.large_string())
    assert to_table(table.slice(rows - 101), wide)["val"].to_pylist()[:2] == ["x" * width, "y" * width]


STRUCTS = pa.StructArray.from_arrays(
    [pa.array([1, 2, 3]), pa.array(["a", "b", "c"]), pa.array([0] * 3), pa.array([1] * 3)],
    ["key", "val", "time", "diff"],
    mask=pa.array([False, True, False]),
)


def test_an_array_of_structs_is_a_table() -> None:
    (batch,) = chunks_of(STRUCTS.slice(2))
    assert to_table(batch, PLAIN).to_pylist() == [{"key": 3, "val": "c", "time": 0, "diff": 1}]
    with pytest.raises(InvalidUpdate, match="row 1 of an array of structs is null"):
        list(chunks_of(STRUCTS))


NO_TABLES = {
    "array": pa.array([1]),
    "an array with nulls among arrays": iter([STRUCTS.slice(2), STRUCTS]),
    "chunked array": pa.chunked_array([pa.array([1])]),
    "chunked structs with nulls": pa.chunked_array([STRUCTS]),
    "series": pl.Series([1]),
    "an array among tables": iter([pa.array([1])]),
    "mapping": MappingProxyType({(1, "a", 0, 1): 5}),
    "class": list,
}


@pytest.mark.parametrize("name", NO_TABLES)
def test_what_is_no_table_is_refused(name: str) -> None:
    with pytest.raises(InvalidUpdate):
        list(chunks_of(NO_TABLES[name]))
