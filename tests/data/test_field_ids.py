"""Goal: every field of a part has its id, at any depth; the ids follow from the schemas alone; no result
carries them."""

from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings

from aiopersist.base.frontier import Antichain, Description
from aiopersist.data.part.part import PartWriter, decode_part
from aiopersist.data.types.field_ids import FIRST, FIXED, field_ids, with_field_ids
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.consolidate import sort_and_consolidate
from aiopersist.data.updates.convert import to_table
from aiopersist.data.updates.updates import Updates
from tests.data import data_oracle as oracle
from tests.data.data_oracle import cases, schema_of

START = Description(Antichain(0), Antichain(), Antichain(0))
ROOTS = {"key": 1, "val": 2, "time": 3, "diff": 4}

POINT = pa.struct([pa.field("x", pa.int64(), False), pa.field("y", pa.int64(), False)])
OLDEST = pa.struct([pa.field("points", pa.list_(POINT)), pa.field("name", pa.string())])
LATER = pa.struct([*OLDEST, pa.field("tags", pa.list_(pa.string()))])
LATEST = pa.struct(
    [pa.field("points", pa.list_(pa.struct([*POINT, pa.field("z", pa.int64())]))), *list(LATER)[1:]]
)

GOLDEN = {
    "plain": ([(str, int)], {}),
    "key fields": ([(POINT, pa.int64())], {"key.x": 16, "key.y": 17}),
    "nested": (
        [(str, OLDEST)],
        {
            "val.points": 16,
            "val.points.element": 17,
            "val.points.element.x": 18,
            "val.points.element.y": 19,
            "val.name": 20,
        },
    ),
    "evolved": (
        [(str, OLDEST), (str, LATER), (str, LATEST)],
        {
            "val.points": 16,
            "val.points.element": 17,
            "val.points.element.x": 18,
            "val.points.element.y": 19,
            "val.points.element.z": 23,
            "val.name": 20,
            "val.tags": 21,
            "val.tags.element": 22,
        },
    ),
}


def stored_ids(data: Any) -> dict[str, int]:
    """The ids in a Parquet file, by dotted path, as its own schema tells them."""
    return ids_in(pq.read_schema(BytesIO(data)))


def ids_in(fields: Any, path: str = "") -> dict[str, int]:
    ids: dict[str, int] = {}
    for field in fields:
        here = f"{path}.{field.name}" if path else field.name
        ids[here] = int(field.metadata[b"PARQUET:field_id"])
        t = field.type
        if pa.types.is_map(t):
            children = [t.key_field, t.item_field]
        else:
            children = [t.field(n) for n in range(t.num_fields)] if pa.types.is_nested(t) else []
        ids |= ids_in(children, here)
    return ids


@pytest.mark.parametrize(("schemas", "golden"), GOLDEN.values(), ids=GOLDEN)
def test_golden_ids(schemas: list[tuple[Any, Any]], golden: dict[str, int]) -> None:
    columns = [Schema(key=key, val=val).arrow_schema for key, val in schemas]
    assert {".".join(path): n for path, n in field_ids(columns).items() if n >= FIRST} == golden
    assert ids_in(with_field_ids(columns)) == {**ROOTS, **golden}


def test_product_times() -> None:
    columns = with_field_ids([Schema(key=str, val=int, time=2).arrow_schema])
    assert ids_in(columns) == {**ROOTS, "time.element": 5}


def test_ids_take_less_than_a_kilobyte_of_a_part() -> None:
    schema: Schema[Any, Any, Any] = Schema(key=str, val=LATEST)
    val = {"points": [{"x": 1, "y": 2, "z": None}], "name": "n", "tags": ["a"]}
    table = to_table([("k", val, 0, 1)], schema)
    with_ids, without = (
        PartWriter(schema, START, columns=columns).whole(table, 10**6).size
        for columns in (None, schema.arrow_schema)
    )
    assert 0 < with_ids - without < 1000


def test_ids_below_the_first_are_fixed() -> None:
    assert max(FIXED.values()) < FIRST


def test_lists_maps_and_wide_lists_of_own_codecs() -> None:
    point = pa.field("element", POINT)
    val = pa.struct(
        [
            pa.field("wide", pa.large_list(point)),
            pa.field("fixed", pa.list_(point, 2)),
            pa.field("map", pa.map_(pa.string(), POINT)),
        ]
    )
    columns = pa.schema([pa.field(name, val if name == "val" else pa.int64(), False) for name in ROOTS])
    ids = ids_in(with_field_ids([columns]))
    assert ids["val.wide.element.x"] == 18 and ids["val.fixed.element.x"] == 22
    assert {ids["val.map.key"], ids["val.map.value"], ids["val.map.value.y"]} == {25, 26, 28}
    assert with_field_ids([columns]).equals(columns)


@cases
def test_every_type_has_ids_in_its_file_and_none_in_its_rows(case: oracle.Case) -> None:
    schema = schema_of(case)

    @settings(max_examples=5)
    @given(oracle.rows_of(case))
    def check(rows: list[Any]) -> None:
        table = sort_and_consolidate(to_table(rows, schema))
        if not table.num_rows:
            return
        part = PartWriter(schema, START).whole(table, 10**6)
        ids = stored_ids(part.data)
        assert len(set(ids.values())) == len(ids) and ROOTS.items() <= ids.items()
        read = decode_part(bytes(part.data), part, schema)
        assert read.schema.equals(schema.arrow_schema, check_metadata=True)
        assert oracle.plain(Updates(read, schema).rows()) == oracle.consolidated(rows)

    check()
