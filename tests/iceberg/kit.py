"""Published tables, as other programs read them."""

import asyncio
import os
import re
from pathlib import Path
from typing import Any

import polars as pl
from pyiceberg.table import StaticTable

import aiopersist as ap
from aiopersist.base.errors import StorageUnavailable
from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus
from aiopersist.storage.wrapper import READS, WrappedBlob, WrappedConsensus
from tests.support.published import Rows, counted, of_arrow

os.environ.setdefault("POLARS_ICEBERG_PLANNER", "pyiceberg")  # the other one is a package of its own

SETTINGS = ap.Settings(inline_writes_single_max_bytes=0)
"""Each write makes a part in a blob."""


async def contents(client: ap.Client, name: str = "t", as_of: Any = None) -> Rows:
    """What the library reads."""
    async with client.reader(name) as r, r.snapshot(as_of) as snapshot:
        return await asyncio.to_thread(of_arrow, await snapshot.to_arrow())


def static_table(metadata: str, **properties: str) -> StaticTable:
    return StaticTable.from_metadata(metadata, properties)


def by_pyiceberg(metadata: str, **options: Any) -> Rows:
    """What pyiceberg reads."""
    return of_arrow(static_table(metadata).scan(**options).to_arrow())


def by_polars(metadata: str) -> Rows:
    """What polars reads by itself."""
    frame = pl.scan_iceberg(metadata, reader_override="native").collect()
    return counted((row["key"], row["val"], 1) for row in frame.iter_rows(named=True))


ENGINES = {"pyiceberg": by_pyiceberg, "polars": by_polars}


def assert_shows(metadata: str, expected: Rows) -> None:
    """Both engines show these rows."""
    for name, read in ENGINES.items():
        assert read(metadata) == expected, name


def path_of(uri: str) -> Path:
    return Path(uri.removeprefix("file://"))


def files_of(metadata: str, content: int) -> list[str]:
    """The URIs of the data files (0) or of the files of deleted positions (1) of the newest snapshot."""
    files = static_table(metadata).inspect.all_files().to_pylist()
    return sorted({file["file_path"] for file in files if file["content"] == content})


def planned(metadata: str, row_filter: str) -> int:
    """How many data files pyiceberg reads for a filter."""
    return len(list(static_table(metadata).scan(row_filter=row_filter).plan_files()))


def own_files(folder: Path) -> dict[str, int]:
    """The files of all publications in a location, with their sizes."""
    root = folder / "blob" / "iceberg"
    return {str(path.relative_to(root)): path.stat().st_size for path in root.rglob("*") if path.is_file()}


def part_key(uri: str) -> str:
    """The blob key of a part."""
    match = re.search(r"/blob/(s[0-9a-f-]{36}/.*)", uri)
    return match[1] if match else ""


class Killed(StorageUnavailable):
    """The process is gone: no call happens any more."""

    def __init__(self) -> None:
        super().__init__("killed", retry=False)


class Life:
    """Ends at the `calls`-th write to a store, before it or after it."""

    def __init__(self, calls: int, *, after: bool) -> None:
        self.left = calls
        self.after = after

    async def call(self, op: str, request: Any) -> Any:
        """Make the request while alive."""
        self.left -= op not in READS
        if self.left < 0 or (self.left == 0 and not self.after):
            self.left = 0
            raise Killed
        result = await request()
        if self.left == 0 and op not in READS:
            raise Killed
        return result


class MortalBlob(WrappedBlob):
    """A blob store of a process that is killed."""

    def __init__(self, inner: Blob, life: Life) -> None:
        super().__init__(inner)
        self.life = life

    def _request(self, op: str, request: Any, sent: int = 0) -> Any:
        return self.life.call(op, request)


class MortalConsensus(WrappedConsensus):
    """A consensus store of a process that is killed."""

    def __init__(self, inner: Consensus, life: Life) -> None:
        super().__init__(inner)
        self.life = life

    def _request(self, op: str, request: Any, sent: int = 0) -> Any:
        return self.life.call(op, request)
