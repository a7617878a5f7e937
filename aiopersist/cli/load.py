"""`aiopersist load`: files of columns into a shard or a table, in one commit.

The rows stream from the files through Arrow into parts, so memory does not grow with them. What cannot be
stored is refused with its file and row, and nothing is written: the commit is the last step.
"""

import os
import re
from collections.abc import AsyncIterator, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import typer

from aiopersist.base.errors import InvalidUpdate, UnknownShard
from aiopersist.base.progress import Progressing, progress
from aiopersist.cli.appending import DIFF, append_rows, overwrite_rows
from aiopersist.cli.command import CannotBegin, Invocation, Problems
from aiopersist.cli.files import (
    STDIN,
    bad_rows,
    batches_of,
    check_there,
    format_of_file,
    is_pipe,
    opened,
    size_of,
)
from aiopersist.cli.formats import Format
from aiopersist.cli.layout import ColumnLayout, columns_in, in_micros
from aiopersist.cli.names import ShardName
from aiopersist.cli.ndjson import Types
from aiopersist.cli.progress import drawn
from aiopersist.cli.shown import counted
from aiopersist.cli.tables import key_type
from aiopersist.cli.texts import first_refused, from_texts, instants_of, named_type, read_type
from aiopersist.client.client import Client
from aiopersist.data.lazy import pa, pc
from aiopersist.data.types.encodings import natural
from aiopersist.data.types.schema import Schema
from aiopersist.table.handle import overwrite

ROW = re.compile(r"\brow \d+: ")
TEXTS = (Format.CSV, Format.NDJSON)


class LoadMode(StrEnum):
    """What becomes of what is there."""

    APPEND = "append"
    UPSERT = "upsert"
    OVERWRITE = "overwrite"


REFUSED = {
    (LoadMode.APPEND, True): "is a table, with one val per key: say --mode upsert, or overwrite",
    (LoadMode.UPSERT, False): "is no table: say --mode append, or overwrite",
}
"""Why a mode is none for what is there, by whether that is a table."""


async def load(
    run: Invocation,
    shard: ShardName,
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Files; - is standard input.")],
    key: Annotated[list[str], typer.Option(help="A column of the key; several make a struct.")],
    form: Annotated[Format | None, typer.Option("--format", help="parquet, csv, ndjson or arrow.")] = None,
    mode: Annotated[
        LoadMode | None,
        typer.Option(help="upsert: a table; append: to a shard; overwrite: all.", show_default=False),
    ] = None,
    types: Annotated[
        list[str] | None,
        typer.Option("--type", metavar="COLUMN=TYPE", help="Of a new shard: str, int, decimal(12,2), ..."),
    ] = None,
) -> None:
    """Load files into a table, or into a shard, in one commit."""
    formats = [format_of_file(path, form) for path in files]
    check_there(files)
    wanted = dict(map(_column_type, types or ()))
    async with run.writing(make=True) as client:
        known, is_table = await _known(client, shard)
        mode = mode or (LoadMode.UPSERT if is_table else LoadMode.APPEND)
        if known is not None and (refusal := REFUSED.get((mode, is_table))):
            raise CannotBegin(f"{shard!r} {refusal}")
        if known is not None and wanted:
            raise CannotBegin(f"{shard!r} is there, and has its types: --type is for a new one")
        has_diff = mode is LoadMode.APPEND or (mode is LoadMode.OVERWRITE and not is_table)
        source = Source(files, formats, tuple(dict.fromkeys(key)), has_diff, known, wanted)
        async with _empty_told(client, shard, known is None):
            rows = await drawn(run.err, _loaded(client, shard, is_table, source, mode))
    new = f", a new {'shard' if mode is LoadMode.APPEND else 'table'}" if known is None else ""
    result = {"shard": shard, "mode": mode, "rows": rows, "new": known is None}
    run.tell(result, f"{shard}: {counted(rows, 'row')} loaded{new}")


def _column_type(text: str) -> tuple[str, "pa.DataType"]:
    column, _, name = text.rpartition("=")
    try:
        return column, named_type(name)
    except ValueError:
        names = "str, int, float, bool, bytes, date, time, datetime, timedelta, decimal(12,2), int32, ..."
        raise CannotBegin(f"--type {text!r} is no COLUMN=TYPE, with a type as {names}") from None


async def _known(client: Client, shard: str) -> tuple[Schema[Any, Any, Any] | None, bool]:
    """The schema of the shard, if it is there, and whether it is a table, or will be."""
    try:
        _, schema = await client.schema(shard)
    except UnknownShard:
        return None, True
    return schema, (await client.admin.inspect(shard)).table


async def _loaded(client: Client, shard: str, is_table: bool, source: "Source", mode: LoadMode) -> int:
    """How many rows were loaded."""
    with progress("load", source.size, "bytes") as told:
        source.told = told  # which reports also behind this: the steps after it report for themselves
    rows = source.rows()
    try:
        await _store(client, shard, is_table, source.schema, rows, mode)
    except InvalidUpdate as error:
        reason = str(error) if error.row is None else ROW.sub("", str(error), count=1)  # it counts from 0 on
        raise Problems(f"{source.place(error.row)}{reason}; nothing was written") from error
    finally:
        rows.close()
    return source.read


@asynccontextmanager
async def _empty_told(client: Client, shard: str, is_new: bool) -> AsyncIterator[None]:
    """A load that fails within, after it has made its shard, says so: its types are those of the file."""
    try:
        yield
    except Problems as error:
        if is_new and shard in await client.list_shards():
            hint = f"aiopersist drop {shard} --yes takes it away"
            raise Problems(f"{error}; {shard!r} was made, and is empty: {hint}") from error
        raise


async def _store(
    client: Client,
    shard: str,
    is_table: bool,
    schema: Schema[Any, Any, Any],
    rows: Iterator[Any],
    mode: LoadMode,
) -> None:
    if mode is LoadMode.APPEND:
        await append_rows(client, shard, schema, rows)
    elif mode is LoadMode.OVERWRITE and not is_table:
        await overwrite_rows(client, shard, schema, rows)
    else:
        types = key_type(schema.key.arrow("key")), schema.val.arrow("val")
        table = client.table(shard, *types, resident=False)
        await (overwrite(table, rows) if mode is LoadMode.OVERWRITE else table.put_many(rows))


@dataclass(eq=False)
class Source:
    """The rows of some files, as columns `key` and `val`; read once."""

    files: Sequence[str]
    formats: Sequence[Format]
    key: tuple[str, ...]
    has_diff: bool
    """Whether a column `diff` has the diffs."""
    known: Schema[Any, Any, Any] | None
    """The schema of the shard; `None`: that of the first file."""
    types: Mapping[str, "pa.DataType"] = field(default_factory=dict)
    """The types of columns that the first file does not decide on."""
    told: Progressing | None = None
    read: int = 0
    """Rows so far."""
    starts: list[int] = field(default_factory=list)
    """The number of the first row of each file."""

    @property
    def size(self) -> int | None:
        """Bytes of all files, if that is known."""
        return size_of(self.files)

    @property
    def schema(self) -> Schema[Any, Any, Any]:
        """The schema of the shard, or, for a new one, that of the first file."""
        if self.known is None:
            path, form = self.files[0], self.formats[0]
            if is_pipe(path):
                what = "standard input" if path == STDIN else f"{path} is no regular file: it"
                raise Problems(f"{what} says no types: it is loaded into a shard that is there")
            columns = _inferred(path, form)
            layout = self._laid_out(path, columns)
            if unknown := [name for name in self.types if name not in layout.columns]:
                raise Problems(f"{path}: no column {unknown[0]!r}; there are {', '.join(layout.columns)}")
            try:
                fields = [in_micros(columns.field(name)) for name in layout.columns]
                fields = [f.with_type(natural(self._type(f))) for f in fields]
                self.known = layout.schema(pa.schema(fields))
            except TypeError as error:
                raise Problems(f"{path}: {error}") from None
        return self.known

    def _type(self, column: "pa.Field") -> "pa.DataType":
        inferred = pa.string() if pa.types.is_null(column.type) else column.type
        return self.types.get(column.name, inferred)

    def place(self, row: int | None) -> str:
        """The file of a row, and its number there, for people: from 1 on."""
        if row is None or not self.starts:
            return f"{self.files[max(len(self.starts) - 1, 0)]}: "
        number = max(n for n, start in enumerate(self.starts) if start <= row)
        return f"{self.files[number]}, row {row - self.starts[number] + 1}: "

    def rows(self) -> "Generator[pa.Table, None, None]":
        """All rows, block by block."""
        schema, before = self.schema, 0
        for path, form in zip(self.files, self.formats, strict=True):
            self.starts.append(self.read)
            with bad_rows(path), opened(path, form) as file:
                columns, batches = batches_of(file, form, self._types(schema, form))
                layout = self._laid_out(path, columns)
                _check_fields(path, layout, schema)
                for batch in batches:
                    yield self._joined(batch, layout, schema, form)
                    self.read += batch.num_rows
                    if self.told is not None and not is_pipe(path):
                        self.told.tell(before + min(file.tell(), os.path.getsize(path)), self.size)
            before += 0 if is_pipe(path) else os.path.getsize(path)

    def _laid_out(self, path: str, columns: "pa.Schema") -> ColumnLayout:
        if not columns.names:
            raise Problems(f"{path}: it is empty, and names no columns; nothing was written")
        if missing := [name for name in self.key if name not in columns.names]:
            raise Problems(f"{path}: no column {missing[0]!r}; there are {', '.join(columns.names)}")
        others = [name for name in columns.names if not (self.has_diff and name == DIFF)]
        if len(set(others)) < len(others):
            raise Problems(f"{path}: two columns have the same name")
        layout = ColumnLayout.of_columns(others, self.key)
        if not layout.val:
            raise Problems(f"{path}: there is no column beside those of the key")
        return layout

    def _types(self, schema: Schema[Any, Any, Any], form: Format) -> Types:
        """The types in which the texts of a file are read: what a text cannot hold stays a text."""

        def types(names: Collection[str]) -> dict[str, pa.DataType]:
            if form not in TEXTS:
                return {}
            fields = columns_in(schema, self.key, names).items()
            is_json = form is Format.NDJSON
            return {name: read_type(field.type, is_json=is_json) for name, field in fields} | (
                {DIFF: pa.int64()} if self.has_diff else {}
            )

        return types

    def _joined(
        self, batch: Any, layout: ColumnLayout, schema: Schema[Any, Any, Any], form: Format
    ) -> "pa.Table":
        table = _table(batch)
        joined = layout.joined(_in_micros(table))
        if form in TEXTS:
            for at, half in enumerate(("key", "val")):
                wanted = schema.arrow_schema.field(half).type
                column = joined.column(half).combine_chunks()
                joined = joined.set_column(at, half, self._from_texts(column, wanted))
        if self.has_diff and DIFF in table.schema.names:
            joined = joined.append_column(DIFF, table.column(DIFF))
        return joined

    def _from_texts(self, column: Any, wanted: "pa.DataType") -> Any:
        """`from_texts`; `Problems` name the first row that it refuses."""
        try:
            return from_texts(column, wanted)
        except ValueError:
            refused = first_refused(len(column), lambda begin, end: from_texts(column[begin:end], wanted))
            assert refused is not None  # each text stands for itself
            row, error = refused
            text = " ".join(str(error).split())
            raise Problems(f"{self.place(self.read + row)}{text}; nothing was written") from None


def _inferred(path: str, form: Format) -> "pa.Schema":
    """The columns of a file as Arrow reads their first block, but none of a type that loses something of its
    texts: as numbers or instants different ones would become the same."""
    with bad_rows(path), opened(path, form) as file:
        columns, _ = batches_of(file, form, lambda names: {})
    kinds = {field.name: field.type for field in columns}
    if len(kinds) < len(columns):  # two have the same name, which is refused
        return columns
    if form is Format.CSV:
        read = dict.fromkeys(kinds, pa.string())
    elif form is Format.NDJSON:
        as_texts = {name: read_type(kind, is_json=True) for name, kind in kinds.items()}
        read = {name: text for name, text in as_texts.items() if text != kinds[name]}
    else:
        return columns
    with bad_rows(path), opened(path, form) as file:
        _, batches = batches_of(file, form, lambda names: read)
        first = next(batches, None)
    if first is None:
        return columns
    texts = _table(first)
    return pa.schema([(name, _settled(kind, texts.column(name))) for name, kind in kinds.items()])


def _settled(of: "pa.DataType", texts: Any) -> "pa.DataType":
    """The type of a column that Arrow reads as `of`."""
    if pa.types.is_integer(of) or pa.types.is_floating(of):
        return pa.string() if pa.types.is_string(texts.type) and _loses(of, texts) else of
    return instants_of(of, texts.combine_chunks())


def _loses(of: "pa.DataType", texts: Any) -> bool:
    """Whether a column of numbers loses something of these texts: an integer that is written in another way,
    as with zeros before it, or that no float is."""
    texts = pc.utf8_trim_whitespace(texts)
    if pa.types.is_integer(of):
        same = pc.equal(pc.cast(pc.cast(texts, of), pa.string()), texts)
        return pc.all(same).as_py() is False
    is_other = pc.any(pc.match_substring_regex(texts, r"^([+-]?0|\+)\d")).as_py()
    long = texts.filter(pc.match_substring_regex(texts, r"^[+-]?\d{16,}$"))
    return bool(is_other) or any(int(float(text)) != int(text) for text in long.to_pylist())


def _check_fields(path: str, layout: ColumnLayout, schema: Schema[Any, Any, Any]) -> None:
    """`Problems` unless the columns of the value are its fields."""
    val = schema.arrow_schema.field("val").type
    if layout.is_val_whole or not pa.types.is_struct(val):
        return
    fields = [field.name for field in val]
    if missing := [field.name for field in val if field.name not in layout.val and not field.nullable]:
        raise Problems(f"{path}: no column {missing[0]!r}: the fields of the val are {', '.join(fields)}")
    if others := [name for name in layout.val if name not in fields]:
        text = f"{path}: column {others[0]!r} is no field of the val: these are {', '.join(fields)}"
        raise Problems(text)


def _table(batch: Any) -> "pa.Table":
    return pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch


def _in_micros(table: "pa.Table") -> "pa.Table":
    """The same with microseconds for nanoseconds, which cannot be stored. Arrow's error, if some would be
    lost."""
    fields = pa.schema([in_micros(field) for field in table.schema])
    return table if fields.equals(table.schema) else table.cast(fields)
