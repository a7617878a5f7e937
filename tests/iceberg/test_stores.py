"""Goal: a table is published in each store that other programs can read, under URIs that they understand."""

from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import polars as pl
import pytest

import aiopersist as ap
from aiopersist.iceberg.table_folder import TableFolder, folder_of, superseded
from aiopersist.storage.memory import MemoryBlob
from tests.iceberg.kit import SETTINGS, contents, counted, of_arrow, static_table


@pytest.mark.parametrize(
    ("url", "uri"),
    [
        ("s3://bucket/a/b?region=eu-west-1&access_key=k&secret_key=s", "s3://bucket/a/b"),
        ("s3://bucket", "s3://bucket"),
        ("gs://bucket/a?bearer_token=t", "gs://bucket/a"),
        ("az://box/a/b?account=me&account_key=a2V5", "abfss://box@me.dfs.core.windows.net/a/b"),
        ("az://box?account=me&account_key=a2V5", "abfss://box@me.dfs.core.windows.net"),
        ("file:///some/folder", "file:///some/folder"),
    ],
)
async def test_uris(url: str, uri: str) -> None:
    blob = ap.open_blob(url)
    try:
        assert blob.uri == uri
    finally:
        await blob.aclose()


def test_folders_of_names() -> None:
    assert folder_of("orders.eu-1_x") == "orders.eu-1_x"
    odd = ["a/b", "a_b/", ".", "..", "a b", "ä", "", ".hidden", "a#b"]
    folders = [folder_of(name) for name in odd]
    assert len(set(folders)) == len(odd)
    assert all(f.replace("-", "").replace("_", "").isalnum() and f.isascii() for f in folders)


def test_what_is_superseded() -> None:
    files = [f"metadata/v{n}.metadata.json" for n in range(1, 7)]
    files += [f"data/{n}-{n}0-deletes-x.parquet" for n in range(1, 7)]
    files += [
        "metadata/6-77-list-6.avro",
        "metadata/2-78-list-6.avro",
        "data/1-x.parquet",
        "metadata/version-hint.text",
    ]
    assert superseded(files, 6, 2, [50, 60, 30]) == [
        *(f"metadata/v{n}.metadata.json" for n in range(1, 5)),
        *(f"data/{n}-{n}0-deletes-x.parquet" for n in (1, 2, 4)),
        "metadata/2-78-list-6.avro",
    ]


def test_a_store_that_only_the_library_reads() -> None:
    with pytest.raises(ap.Unsupported, match="no place that other programs can read"):
        TableFolder.of(MemoryBlob(), "t", "s1")


async def test_a_bucket(s3_url: str, tmp_path: Path) -> None:
    consensus = f"sqlite://{tmp_path}/state.db"
    async with ap.open(blob=s3_url, consensus=consensus, settings=SETTINGS) as client:
        table = client.table("t", key=str, val=float)
        await table.put_many({f"k{i}": i / 2 for i in range(100)})
        await table.put("k5", 7.0)
        await table.delete("k6")
        published = await client.publish(table)
        expected = await contents(client)
        assert published.metadata.startswith("s3://")
        options = {name: values[0] for name, values in parse_qs(urlsplit(s3_url).query).items()}
        endpoint, region = options["endpoint"], options["region"]  # the environment has the keys
        table_of_s3 = static_table(published.metadata, **{"s3.endpoint": endpoint, "s3.region": region})
        assert of_arrow(table_of_s3.scan().to_arrow()) == expected
        storage = {"aws_endpoint_url": endpoint, "aws_allow_http": "true", "aws_region": region}
        frame = pl.scan_iceberg(table_of_s3, reader_override="native", storage_options=storage).collect()
        assert counted((row["key"], row["val"], 1) for row in frame.iter_rows(named=True)) == expected
        assert await client.unpublish(table) > 0
