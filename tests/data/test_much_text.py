"""Goal: updates with more text than one array of Arrow holds, 2 GiB, are sorted, stored and read again."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from aiopersist.base.frontier import Antichain, Description
from aiopersist.data.jsonable import column_from_texts
from aiopersist.data.part.part import PartWriter, decode_part, iter_row_groups, read_index
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.consolidate import contents, sort_and_consolidate
from aiopersist.data.updates.convert import to_table

WHOLE = Description(Antichain(0), Antichain(), Antichain(0))
VALS: dict[str, tuple[pa.DataType, Any]] = {
    "text": (pa.string(), lambda text: text),
    "struct": (pa.struct([pa.field("text", pa.string())]), lambda text: {"text": text}),
    "list": (pa.list_(pa.string()), lambda text: [text]),
}


def updates(val: str, size: int, rows: int, times: int) -> tuple[Schema[Any, Any, Any], pa.Table]:
    """`times` tables of so many rows, in order, whose texts are the same memory."""
    kind, wrap = VALS[val]
    schema: Schema[Any, Any, Any] = Schema(key=int, val=kind)
    texts = pa.array([wrap("x" * size)] * rows, kind)
    ones = pa.array([1] * rows, pa.int64())
    tables = [
        pa.table([pa.array(range(n * rows, (n + 1) * rows)), texts, ones, ones], schema.arrow_schema)
        for n in range(times)
    ]
    return schema, pa.concat_tables(tables)


def check(table: pa.Table, size: int) -> None:
    """The keys are in order, and each val has its text."""
    assert table["key"].to_pylist() == list(range(table.num_rows))
    texts = [pc.list_element(c, 0) if pa.types.is_list(c.type) else c for c in table["val"].chunks]
    texts = [pc.struct_field(c, [0]) if pa.types.is_struct(c.type) else c for c in texts]
    lengths = pc.min_max(pc.binary_length(pa.chunked_array(texts)))
    assert lengths.as_py() == {"min": size, "max": size}


@pytest.mark.parametrize("val", VALS)
def test_tables_of_a_part_are_of_one_row_group(val: str) -> None:
    """Goal: where rows are larger than elsewhere, a table of so many rows would have any size."""
    schema, table = updates(val, 10, 6, 1)
    part = PartWriter(schema, WHOLE).whole(to_table(table, schema), 90)
    data = bytes(part.data)
    tables = iter_row_groups(read_index(data, part), (0, data), [0, 1, 2], schema, 1000)
    assert [some.num_rows for some in tables] == [2, 2, 2]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("val", VALS)
def test_a_part_with_more_text_than_one_array_holds(val: str) -> None:
    """Goal: a compaction makes parts by their encoded size, which may be little."""
    schema, table = updates(val, 2**20, 256, 9)
    part = PartWriter(schema, WHOLE).whole(table, 2**23)
    check(decode_part(bytes(part.data), part, schema), 2**20)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("val", "size", "rows"),
    [("text", 2**26, 2), ("struct", 2**20, 256), ("list", 2**20, 256), ("struct", 2**18, 1024)],
)
def test_more_text_than_one_array_holds_is_sorted(val: str, size: int, rows: int) -> None:
    """Goal: few rows, some and many, each of which take a way of their own."""
    schema, table = updates(val, size, rows, 2304 * 2**20 // size // rows)
    table = pa.concat_tables([table.slice(start, rows) for start in reversed(range(0, len(table), rows))])
    check(sort_and_consolidate(table), size)
    check(contents(table, schema), size)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_texts_of_more_than_one_array_holds() -> None:
    """Goal: the rows of a stash are read, and the changes of a table made, whatever their size."""
    kind, rows = VALS["struct"][0], 2304 // 4
    vals = column_from_texts(['{"text":"' + "x" * 2**22 + '"}'] * rows, kind)
    ones = pa.array([1] * rows)
    check(pa.table([pa.array(range(rows)), vals, ones, ones], ["key", "val", "time", "diff"]), 2**22)
