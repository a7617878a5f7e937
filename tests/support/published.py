"""Published tables as pyiceberg reads them, out of the bytes of a blob store."""

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from io import BytesIO
from json import loads
from typing import Any, NamedTuple

import pyarrow as pa
from pyiceberg import manifest
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.io import FileIO, InputFile
from pyiceberg.table import StaticTable
from pyiceberg.table.metadata import TableMetadataUtil

from aiopersist.iceberg.metadata import time_of

Rows = Counter[Any]


def canonical(value: Any) -> Any:
    """A value with a hash, equal for what engines show as equal: NaN, a moment in any zone."""
    if isinstance(value, dict):
        return tuple((name, canonical(inner)) for name, inner in value.items())
    if isinstance(value, list):
        return ("list", *map(canonical, value))
    if isinstance(value, float):
        return "nan" if math.isnan(value) else value
    return bytes(value) if isinstance(value, bytearray) else value


def counted(rows: Iterable[tuple[Any, Any, int]]) -> Rows:
    """Rows `(key, val, diff)` as a multiset."""
    counts: Rows = Counter()
    for key, val, diff in rows:
        counts[canonical(key), canonical(val)] += diff
    return counts


def of_arrow(table: pa.Table) -> Rows:
    """The rows of a table; each counts as one unless it has a column `diff`."""
    columns = [table.column(name).to_pylist() for name in ("key", "val")]
    diffs = table.column("diff").to_pylist() if "diff" in table.column_names else [1] * table.num_rows
    return counted(zip(*columns, diffs, strict=True))


class MissingFile(Exception):
    """The bytes of a file are not there; its argument is the URI."""


class _BytesInput(InputFile):
    def __init__(self, location: str, data: bytes) -> None:
        super().__init__(location)
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def exists(self) -> bool:
        return True

    def open(self, seekable: bool = True) -> Any:
        return BytesIO(self._data)


class _BytesFiles(FileIO):
    """Reads what is in a mapping from URIs to bytes, and writes nothing."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__()
        self._files = files

    def new_input(self, location: str) -> InputFile:
        if location not in self._files:
            raise MissingFile(location)
        return _BytesInput(location, self._files[location])

    def new_output(self, location: str) -> Any:
        raise NotImplementedError

    def delete(self, location: Any) -> None:
        raise NotImplementedError


class Shown(NamedTuple):
    """What a version of a published table shows."""

    as_of: Any
    rows: Rows
    data_files: frozenset[str]
    """Their URIs."""


def shown_by(files: Mapping[str, bytes], metadata: str) -> Shown:
    """What the version with that metadata file shows. `MissingFile` if a file that it needs is absent."""
    table, planned = _planned(files, metadata)
    told = loads(files[metadata])
    (newest,) = [one for one in told["snapshots"] if one["snapshot-id"] == told["current-snapshot-id"]]
    return Shown(time_of(newest), of_arrow(table.scan().to_arrow()), frozenset(planned[0]))


def _planned(files: Mapping[str, bytes], metadata: str) -> tuple[StaticTable, tuple[set[str], set[str]]]:
    """The table, and the URIs of its data files and of their deleted positions."""
    manifest.clear_manifest_cache()  # names and ids repeat in worlds
    io = _BytesFiles(files)
    if metadata not in files:
        raise MissingFile(metadata)
    parsed = TableMetadataUtil.parse_raw(files[metadata].decode())
    table = StaticTable(("published",), parsed, metadata, io, NoopCatalog("published"))
    tasks = list(table.scan().plan_files())
    deletes = {file.file_path for task in tasks for file in task.delete_files}
    return table, ({task.file.file_path for task in tasks}, deletes)


async def shown_in(get: Callable[[str], Awaitable[bytes | None]], metadata: str) -> Shown:
    """Likewise; `get` reads the bytes of a URI."""
    files: dict[str, bytes] = {}

    async def fetch(uri: str) -> None:
        data = await get(uri)
        if data is None:
            raise MissingFile(uri)
        files[uri] = data

    while True:
        try:
            _, (data_files, deletes) = await asyncio.to_thread(_planned, files, metadata)
            break
        except MissingFile as missing:
            await fetch(missing.args[0])
    await asyncio.gather(*map(fetch, data_files | deletes))
    return await asyncio.to_thread(partial(shown_by, files, metadata))
