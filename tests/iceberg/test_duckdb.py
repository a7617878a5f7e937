"""Goal: DuckDB shows what the library reads. Its extension comes from a package of PyPI, for one version of
DuckDB: `tox -e iceberg` has both."""

from pathlib import Path
from typing import Any

import duckdb
import pytest

import aiopersist as ap
from tests.iceberg.kit import SETTINGS, Rows, contents, counted
from tests.iceberg.test_types import LIST_OF_STRUCTS, SUPPORTED, written

pytestmark = [pytest.mark.long, pytest.mark.blocks_loop]


@pytest.fixture(scope="module")
def connection() -> Any:
    (package,) = pytest.importorskip("duckdb_ext").__path__
    folder = Path(package) / "extensions" / f"v{duckdb.__version__}"
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    for name in ("avro", "iceberg"):
        for path in folder.glob(f"*/{name}.duckdb_extension"):
            connection.execute(f"LOAD '{path}'")
            break
        else:
            pytest.skip(f"there is no extension {name} of DuckDB {duckdb.__version__}: tox -e iceberg")
    return connection


def by_duckdb(connection: Any, metadata: str) -> Rows:
    path = metadata.removeprefix("file://")
    rows = connection.sql(f"SELECT key, val FROM iceberg_scan('{path}')").fetchall()
    return counted((key, val, 1) for key, val in rows)


@pytest.mark.parametrize("name", [*SUPPORTED, "list of structs"])
async def test_a_type(tmp_path: Path, connection: Any, name: str) -> None:
    t, values = SUPPORTED.get(name, (LIST_OF_STRUCTS, [[None, {"a": 1, "b": None}], []]))
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        await written(client, t, values)
        for as_of in (0, 1, 2):
            published = await client.publish("t", as_of=as_of)
            assert by_duckdb(connection, published.metadata) == await contents(client, as_of=as_of)


async def test_the_newest_version(tmp_path: Path, connection: Any) -> None:
    async with ap.open(tmp_path, settings=SETTINGS, maintenance=False) as client:
        table = client.table("t", key=str, val=int)
        for number in range(3):
            await table.put_many({"a": number, f"b{number}": number})
            published = await client.publish(table)
        assert by_duckdb(connection, published.location) == await contents(client)
