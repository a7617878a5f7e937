"""Goal: a text is one type, however Arrow encodes it: what is stored in wide texts is opened by `str`, and
what comes in any encoding is stored, at any depth."""

from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pydantic import BaseModel

import aiopersist as ap
from aiopersist.data.types.encodings import encoded_as, natural

WIDE = pa.struct(
    [
        pa.field("name", pa.large_string(), False),
        pa.field("raw", pa.large_binary()),
        pa.field("tags", pa.list_(pa.field("element", pa.large_string(), False)), False),
    ]
)


class Val(BaseModel):
    name: str
    raw: bytes | None
    tags: list[str]


class Key(NamedTuple):
    name: str
    number: int


VAL = Val(name="x", raw=b"r", tags=["a", "b"])
RAW = {"name": "x", "raw": b"r", "tags": ["a", "b"]}

ENCODINGS: dict[str, Any] = {
    "wide": pa.array(["a", "b", None], pa.large_string()),
    "view": pa.array(["a", "b", None], pa.string_view()),
    "dictionary": pa.array(["a", "b", None]).dictionary_encode(),
    "dictionary of wide": pa.array(["a", "b", None], pa.large_string()).dictionary_encode(),
    "runs": pa.RunEndEncodedArray.from_arrays(pa.array([1, 2, 3], pa.int32()), pa.array(["a", "b", None])),
    "extension": pa.ExtensionArray.from_storage(pa.json_(pa.string()), pa.array(["a", "b", None])),
}


@pytest.mark.parametrize("array", [pytest.param(array, id=name) for name, array in ENCODINGS.items()])
async def test_each_encoding_is_written_as_a_text(array: Any, mem: ap.Client) -> None:
    """Goal: alone, in structs, and in lists, into a table and by a writer."""
    assert natural(array.type) == pa.string()
    inner = pa.StructArray.from_arrays([array], ["name"])
    lists = pa.LargeListArray.from_arrays(pa.array([0, 2, 3, 3], pa.int64()), array)
    keys = pa.array(["k0", "k1", "k2"], pa.string_view())
    for name, val, kind, wanted in (
        ("plain", array[:2], str, ["a", "b"]),
        ("struct", inner, pa.struct([("name", pa.string())]), [{"name": "a"}, {"name": "b"}, {"name": None}]),
        ("list", lists, list[str | None], [["a", "b"], [None], []]),
    ):
        data = pa.table({"key": keys[: len(val)], "val": val})
        table = mem.table(name, key=str, val=kind)
        await table.put_many(data)
        assert [entry async for entry in table.items()] == list(zip(keys.to_pylist(), wanted, strict=False))
        async with mem.writer(f"{name}s", ap.Schema(key=str, val=kind)) as writer:
            await writer.write(data.append_column("diff", pa.array([1] * len(data))))


async def stored_wide(client: ap.Client, name: str = "t") -> None:
    """A table as `load` made it of such a file before: of wide texts and bytes."""
    table = client.table(name, key=pa.large_string(), val=WIDE)
    await table.put("k", RAW)
    await table.aclose()


async def test_a_table_of_wide_texts_is_opened_by_str(mem: ap.Client) -> None:
    await stored_wide(mem)
    table = mem.table("t", key=str, val=Val)
    assert await table.get("k") == VAL
    await table.put("l", VAL)
    await table.put_many({f"m{n}": VAL for n in range(100)})
    assert await table.count(where=pc.field("name") == "x") == 102
    assert [key async for key, _ in table.items(prefix="k")] == ["k"]
    assert [key async for key, _ in table.items(start="l", stop="m1")] == ["l", "m0"]
    assert await table.get_many(["k", "l", "none"]) == {"k": VAL, "l": VAL}
    async with table.changes(keys=["k", "l"]) as feed:
        step = await anext(aiter(feed))
    assert {change.key for change in step.changes} == {"k", "l"}

    async def body(tx: ap.Transaction) -> list[str]:
        tx.put(table, "n", VAL)
        return [key async for key, _ in tx.items(table, start="l", stop="m1")]

    assert await mem.transact(body) == ["l", "m0"]
    assert await table.update("n", lambda val: None) is None
    again = mem.table("t", key=pa.large_string(), val=WIDE)  # the same table, by the stored types
    assert await again.get("l") == RAW and await again.count() == 102

    async def both(tx: ap.Transaction) -> tuple[Any, Any]:
        return await tx.get(table, "k"), await tx.get(again, "l")

    assert await mem.transact(both) == (VAL, VAL)  # of one view
    assert (await mem.fsck("t")).ok
    await mem.force_compaction("t")
    assert await mem.table("t", key=str, val=Val, resident=False).get("m7") == VAL


async def test_shards_of_wide_texts_are_read_and_written_by_str(mem: ap.Client) -> None:
    wide = ap.Schema(key=pa.large_string(), val=WIDE)
    by_str: ap.Schema[str, Val, int] = ap.Schema(key=str, val=Val)
    async with mem.writer("s", wide) as writer:
        await writer.write([("a", RAW)])
    async with mem.writer("s", by_str) as writer:
        await writer.write([("b", VAL)])
    async with mem.reader("s", by_str) as reader, reader.snapshot() as snapshot:
        assert await snapshot.rows() == [("a", VAL, 1), ("b", VAL, 1)]
        where = pc.field("name").isin(pa.array(["x"]))
        assert len(await snapshot.rows(where=where)) == 2
        tickets = [part.to_transmittable() for part in snapshot.parts()]
        assert sum([len((await mem.fetch_part(ticket, by_str)).rows()) for ticket in tickets]) == 2
    async with mem.subscription("s", by_str, name="sub") as subscription:
        step = await anext(aiter(subscription))
        assert sorted(update.key for update in step.updates) == ["a", "b"]
    transmitted = await mem.register_writer("s", by_str, 60.0)
    builder = await mem.builder_from_transmittable(transmitted, 0, by_str)
    await builder.aclose()
    with pytest.raises(ap.CodecMismatch):
        await mem.reader("s", ap.Schema(key=bytes, val=Val))


async def test_the_other_way_round(mem: ap.Client) -> None:
    """Goal: who names wide texts opens what is stored in narrow ones, keys of several fields, too."""
    key = pa.struct([pa.field("name", pa.string(), False), pa.field("number", pa.int64(), False)])
    narrow = mem.table("t", key=Key, val=str)
    await narrow.put(Key("a", 1), "v")
    await narrow.aclose()
    table = mem.table("t", key=Key, val=pa.large_string())
    assert await table.get(Key("a", 1)) == "v"
    schema: ap.Schema[Any, Any, int] = ap.Schema(key=key, val=pa.string())
    assert encoded_as(schema, schema) is schema


async def test_fields_are_added_by_natural_types(mem: ap.Client) -> None:
    """Goal: who names `str` adds a field to what is stored in wide texts, too."""

    class Longer(BaseModel):
        name: str
        age: int | None = None

    val = pa.struct([pa.field("name", pa.large_string(), False)])
    table = mem.table("people", key=pa.large_string(), val=val)
    await table.put("a", {"name": "Ada"})
    await mem.compare_and_evolve_schema("people", 0, ap.Schema(key=str, val=Longer))
    longer = mem.table("people", key=str, val=Longer)
    await longer.put("b", Longer(name="Bob", age=3))
    assert await longer.get_many(["a", "b"]) == {"a": Longer(name="Ada"), "b": Longer(name="Bob", age=3)}
    assert await table.get("b") == {"name": "Bob"}
