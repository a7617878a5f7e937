"""Goal: an optional field that Arrow data or a file does not have is null, as in rows: who adds a column need
not change those who write; a field that is needed, or not known, is refused."""

import json
from pathlib import Path

import pyarrow as pa
import pytest
from pydantic import BaseModel

import aiopersist as ap
from tests.cli.test_commands import aiopersist


class Item(BaseModel):
    count: int


class Described(BaseModel):
    count: int
    note: str | None = None


SCHEMA = ap.Schema(key=str, val=Described)
GIVEN = {
    "nested": pa.table({"key": ["b"], "val": [{"count": 2}]}),
    "flat": pa.table({"key": ["b"], "count": [2]}),
    "with a null": pa.table({"key": ["b"], "count": [2], "note": pa.nulls(1)}),
}


@pytest.mark.parametrize("form", GIVEN)
async def test_an_added_field_may_be_absent(form: str) -> None:
    async with ap.open("mem://") as client:
        old = client.table("stock", str, Item)
        await old.put("a", Item(count=1))
        number, _ = await client.schema("stock")
        await client.compare_and_evolve_schema("stock", number, SCHEMA)
        stock = client.table("stock", str, Described)
        await stock.put_many(GIVEN[form])
        assert await stock.get_many(["a", "b"]) == {"a": Described(count=1), "b": Described(count=2)}
        async with client.writer("shard", SCHEMA) as writer:
            await writer.write(GIVEN[form])
            async with client.reader("shard", SCHEMA) as reader, reader.snapshot() as snapshot:
                assert [row[:2] for row in await snapshot.rows()] == [("b", Described(count=2))]


@pytest.mark.parametrize(
    "given",
    [
        pa.table({"key": ["b"], "val": [{"note": "x"}]}),
        pa.table({"key": ["b"], "note": ["x"]}),
        pa.table({"key": ["b"], "val": [{"count": 1, "colour": "x"}]}),
        pa.table({"key": ["b"], "count": [1], "colour": ["x"]}),
    ],
    ids=["nested, lacks", "flat, lacks", "nested, unknown", "flat, unknown"],
)
async def test_what_is_needed_or_unknown_is_refused(given: pa.Table) -> None:
    async with ap.open("mem://") as client:
        stock = client.table("stock", str, Described)
        with pytest.raises(ap.InvalidUpdate, match=r"colour|note"):
            await stock.put_many(given)
        assert await stock.count() == 0


@pytest.mark.parametrize("form", ["ndjson", "csv"])
def test_a_file_may_lack_it(form: str, tmp_path: Path) -> None:
    texts = {"ndjson": '{"key": "b", "count": 2}\n', "csv": "key,count\nb,2\n"}
    full = tmp_path / "full.ndjson"
    full.write_text('{"key": "a", "count": 1, "note": "x"}\n')
    short = tmp_path / f"short.{form}"
    short.write_text(texts[form])
    place = ("--key", "key", "--location", tmp_path / "made")
    assert aiopersist("load", "stock", full, *place).status == 0
    loaded = aiopersist("load", "stock", short, *place)
    assert loaded.status == 0, loaded.err
    got = aiopersist("get", "stock", "b", "--location", tmp_path / "made")
    assert json.loads(got.out) == {"count": 2, "note": None}
