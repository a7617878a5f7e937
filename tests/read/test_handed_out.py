"""Goal: Arrow tables and batches that the library gives can be written as Parquet as they are: also where a
struct is absent whose fields are required, which pyarrow's writer takes for nulls that may not be."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

import aiopersist as ap


class Inner(BaseModel):
    x: int
    texts: list[str]


class Val(BaseModel):
    inner: Inner | None
    inners: list[Inner | None]
    n: int


SCHEMA = ap.Schema(str, Val)
INNER = Inner(x=1, texts=["a"])
ROWS = {
    "absent": Val(inner=None, inners=[None, INNER], n=1),
    "there": Val(inner=INNER, inners=[], n=2),
}


@pytest.mark.parametrize("inline_max", [0, 2**20], ids=["in blobs", "inline"])
async def test_what_is_given_can_be_written(inline_max: int, tmp_path: Path) -> None:
    found: dict[str, pa.Table] = {}
    settings = ap.Settings(inline_writes_single_max_bytes=inline_max)
    async with ap.open(tmp_path / "location", settings=settings, maintenance=False) as client:
        table = client.table("rows", str, Val)
        await table.put_many(ROWS)
        found["table"] = await table.to_arrow()
        async with client.reader("rows", SCHEMA) as reader, reader.snapshot() as snapshot:
            found["snapshot"] = await snapshot.to_arrow()
            found["some columns"] = await snapshot.to_arrow(columns=["val.inner", "key"])
            found["batches"] = pa.Table.from_batches([batch async for batch in snapshot.batches()])
            async with reader.listen(snapshot.as_of - 1) as listen:
                found["updates"] = (await anext(listen)).to_arrow()
        async with client.workers.shared_read("rows") as shared:
            pieces = [client.workers.read_piece(piece) for piece in await shared.pieces(1)]
            found["pieces"] = pa.Table.from_batches([batch for piece in pieces async for batch in piece])
    for name, given in found.items():
        file = tmp_path / f"{name}.parquet"
        pq.write_table(given, file)
        assert pq.read_table(file).to_pylist() == given.to_pylist()
        inner = "val.inner" if name == "some columns" else "val"
        vals = [row[inner] for row in sorted(given.to_pylist(), key=lambda row: row["key"])]
        expected = [val.model_dump() for val in ROWS.values()]
        assert vals == ([val["inner"] for val in expected] if inner != "val" else expected)
