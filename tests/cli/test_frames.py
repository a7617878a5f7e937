"""Goal: a table that is loaded from a file of pandas or polars is opened by the types that a user names,
however the file encodes them."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import BaseModel

import aiopersist as ap
from tests.cli.test_commands import aiopersist


class Inner(BaseModel):
    note: str | None


class Val(BaseModel):
    name: str | None
    kind: str | None
    raw: bytes | None
    tags: list[str | None] | None
    inner: Inner | None


ROWS = {
    "a": Val(name="x", kind="one", raw=b"1", tags=["q", "r"], inner=Inner(note="n")),
    "b": Val(name="y", kind="two", raw=b"", tags=[], inner=Inner(note=None)),
    "c": Val(name="x", kind="one", raw=None, tags=["s"], inner=Inner(note="m")),
}
COLUMNS = {"sku": list(ROWS)} | {
    name: [row.model_dump()[name] for row in ROWS.values()] for name in Val.model_fields
}


def by_polars(end: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        frame = pl.DataFrame(COLUMNS).with_columns(kind=pl.col("kind").cast(pl.Categorical))
        (frame.write_parquet if end == "parquet" else frame.write_ipc)(path)

    return write


def by_pandas(path: Path) -> None:
    frame = pd.DataFrame(COLUMNS)
    frame["sku"], frame["name"] = frame["sku"].astype("str"), frame["name"].astype("str")
    frame["kind"] = frame["kind"].astype("category")
    frame.to_parquet(path)


def as_views(path: Path) -> None:
    columns = pa.table(COLUMNS)
    for name in ("sku", "name"):
        at = columns.schema.get_field_index(name)
        columns = columns.set_column(at, name, columns.column(name).cast(pa.string_view()))
    raw = columns.column("raw").cast(pa.binary_view())
    columns = columns.set_column(columns.schema.get_field_index("raw"), "raw", raw)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, columns.schema) as writer:
        writer.write_table(columns)


def wide(path: Path) -> None:
    columns = pa.table(COLUMNS)
    list_of_wide = pa.large_list(pa.large_string())
    columns = columns.set_column(4, "tags", pa.array(COLUMNS["tags"], list_of_wide))
    pq.write_table(columns.set_column(1, "name", columns.column("name").cast(pa.large_string())), path)


@pytest.mark.parametrize(
    ("write", "name"),
    [
        pytest.param(by_pandas, "pandas.parquet", id="pandas, Parquet"),
        pytest.param(by_polars("parquet"), "polars.parquet", id="polars, Parquet"),
        pytest.param(by_polars("ipc"), "polars.feather", id="polars, Feather"),
        pytest.param(as_views, "views.arrow", id="views"),
        pytest.param(wide, "wide.parquet", id="wide texts and lists"),
    ],
)
def test_a_loaded_table_has_natural_types(write: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    write(tmp_path / name)
    at = ("--location", tmp_path / "location")
    loaded = aiopersist("load", "t", tmp_path / name, "--key", "sku", *at)
    assert (loaded.status, loaded.out) == (0, "t: 3 rows loaded, a new table\n"), loaded.err
    assert aiopersist("load", "t", tmp_path / name, "--key", "sku", *at).status == 0  # also what is there

    async def check() -> None:
        async with ap.open(tmp_path / "location", maintenance=False) as client:
            table = client.table("t", key=str, val=Val)
            assert {key: val async for key, val in table.items()} == ROWS

    asyncio.run(check())
