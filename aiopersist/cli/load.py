"""`aiopersist load`: loads files of columns into a shard or a table, in one commit.

Rows stream from the files through Arrow into parts, so memory does not grow with them. An error names file
and row. After an error nothing is written, since the commit is the last step.
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
    check_exist,
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
    """How the rows join the contents."""

    APPEND = "append"
    UPSERT = "upsert"
    OVERWRITE = "overwrite"


REFUSED = {
    (LoadMode.APPEND, True): "is a table, with one value per key: use --mode upsert or overwrite",
    (LoadMode.UPSERT, False): "is no table: use --mode append or overwrite",
}
"""Why a mode is refused, by mode and whether the shard is a table."""


async def load(
    run: Invocation,
    shard: ShardName,
    files: Annotated[list[str], typer.Argument(metavar="FILE", help="Files; - is standard input.")],
    key: Annotated[list[str], typer.Option(help="A key column; several make a struct.")],
    form: Annotated[Format | None, typer.Option("--format", help="parquet, csv, ndjson or arrow.")] = None,
    mode: Annotated[
        LoadMode | None,
        typer.Option(help="upsert: table; append: shard; overwrite: replace all.", show_default=False),
    ] = None,
    types: Annotated[
        list[str] | None,
        typer.Option("--type", metavar="COLUMN=TYPE", help="For a new shard: str, int, decimal(12,2), ..."),
    ] = None,
) -> None:
    """Load files into a table or a shard, in one commit."""
    formats = [format_of_file(path, form) for path in files]
    check_exist(files)
    new_types = dict(map(_column_type, types or ()))
    async with run.writing(make=True) as client:
        stored, is_table = await _stored(client, shard)
        mode = mode or (LoadMode.UPSERT if is_table else LoadMode.APPEND)
        if stored is not None and (refusal := REFUSED.get((mode, is_table))):
            raise CannotBegin(f"{shard!r} {refusal}")
        if stored is not None and new_types:
            raise CannotBegin(f"{shard!r} exists and has its types: --type is for a new shard")
        has_diff = mode is LoadMode.APPEND or (mode is LoadMode.OVERWRITE and not is_table)
        source = Source(files, formats, tuple(dict.fromkeys(key)), has_diff, stored, new_types)
        async with _naming_empty(client, shard, stored is None):
            rows = await drawn(run.err, _loaded(client, shard, is_table, source, mode))
    new = f", a new {'shard' if mode is LoadMode.APPEND else 'table'}" if stored is None else ""
    result = {"shard": shard, "mode": mode, "rows": rows, "new": stored is None}
    run.tell(result, f"{shard}: {counted(rows, 'row')} loaded{new}")


def _column_type(text: str) -> tuple[str, "pa.DataType"]:
    column, _, name = text.rpartition("=")
    try:
        return column, named_type(name)
    except ValueError:
        names = "str, int, float, bool, bytes, date, time, datetime, timedelta, decimal(12,2), int32, ..."
        raise CannotBegin(f"--type {text!r} is no COLUMN=TYPE with a type like {names}") from None


async def _stored(client: Client, shard: str) -> tuple[Schema[Any, Any, Any] | None, bool]:
    """The schema of the shard, if it exists, and whether it is a table or will be one."""
    try:
        _, schema = await client.schema(shard)
    except UnknownShard:
        return None, True
    return schema, (await client.admin.inspect(shard)).table


async def _loaded(client: Client, shard: str, is_table: bool, source: "Source", mode: LoadMode) -> int:
    """Load the rows, and return their number."""
    with progress("load", source.size, "bytes") as reported:
        source.reported = reported  # it also reports after this block; later steps report themselves
    rows = source.rows()
    try:
        await _store(client, shard, is_table, source.schema, rows, mode)
    except InvalidUpdate as error:
        reason = str(error) if error.row is None else ROW.sub("", str(error), count=1)  # it counts from 0
        raise Problems(f"{source.place(error.row)}{reason}; nothing was written") from error
    finally:
        rows.close()
    return source.read


@asynccontextmanager
async def _naming_empty(client: Client, shard: str, is_new: bool) -> AsyncIterator[None]:
    """Adds a hint to an error if the load has created its shard, whose types would stay."""
    try:
        yield
    except Problems as error:
        if is_new and shard in await client.list_shards():
            hint = f"aiopersist drop {shard} --yes removes it"
            raise Problems(f"{error}; {shard!r} was created and is empty: {hint}") from error
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
    """The rows of files, as columns `key` and `val`; they can be read once."""

    files: Sequence[str]
    formats: Sequence[Format]
    key: tuple[str, ...]
    has_diff: bool
    """Whether a column `diff` contains the diffs."""
    stored: Schema[Any, Any, Any] | None
    """The schema of the shard; `None`: the schema of the first file."""
    types: Mapping[str, "pa.DataType"] = field(default_factory=dict)
    """Types that replace those of the first file, by column."""
    reported: Progressing | None = None
    read: int = 0
    """The number of rows read so far."""
    starts: list[int] = field(default_factory=list)
    """The number of the first row of each file."""

    @property
    def size(self) -> int | None:
        """Bytes of all files, if known."""
        return size_of(self.files)

    @property
    def schema(self) -> Schema[Any, Any, Any]:
        """The schema of the shard; of a new one, the schema of the first file."""
        if self.stored is None:
            path, form = self.files[0], self.formats[0]
            if is_pipe(path):
                name = "standard input" if path == STDIN else f"{path} is no regular file: it"
                raise Problems(f"{name} has no types: it can be loaded only into an existing shard")
            columns = _inferred(path, form)
            layout = self._laid_out(path, columns)
            if unknown := [name for name in self.types if name not in layout.columns]:
                raise Problems(f"{path}: no column {unknown[0]!r}; there are {', '.join(layout.columns)}")
            try:
                fields = [in_micros(columns.field(name)) for name in layout.columns]
                fields = [f.with_type(natural(self._type(f))) for f in fields]
                self.stored = layout.schema(pa.schema(fields))
            except TypeError as error:
                raise Problems(f"{path}: {error}") from None
        return self.stored

    def _type(self, column: "pa.Field") -> "pa.DataType":
        inferred = pa.string() if pa.types.is_null(column.type) else column.type
        return self.types.get(column.name, inferred)

    def place(self, row: int | None) -> str:
        """The file of a row and its number there, from 1 on."""
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
                    if self.reported is not None and not is_pipe(path):
                        self.reported.tell(before + min(file.tell(), os.path.getsize(path)), self.size)
            before += 0 if is_pipe(path) else os.path.getsize(path)

    def _laid_out(self, path: str, columns: "pa.Schema") -> ColumnLayout:
        if not columns.names:
            raise Problems(f"{path}: the file has no columns; nothing was written")
        if missing := [name for name in self.key if name not in columns.names]:
            raise Problems(f"{path}: no column {missing[0]!r}; there are {', '.join(columns.names)}")
        others = [name for name in columns.names if not (self.has_diff and name == DIFF)]
        if len(set(others)) < len(others):
            raise Problems(f"{path}: two columns have the same name")
        layout = ColumnLayout.of_columns(others, self.key)
        if not layout.val:
            raise Problems(f"{path}: there are only columns of the key")
        return layout

    def _types(self, schema: Schema[Any, Any, Any], form: Format) -> Types:
        """The types in which columns of CSV and JSON are read; some stay texts, see `read_type`."""

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
                type_ = schema.arrow_schema.field(half).type
                column = joined.column(half).combine_chunks()
                joined = joined.set_column(at, half, self._from_texts(column, type_))
        if self.has_diff and DIFF in table.schema.names:
            joined = joined.append_column(DIFF, table.column(DIFF))
        return joined

    def _from_texts(self, column: Any, target: "pa.DataType") -> Any:
        """`from_texts`; `Problems` name the first refused row."""
        try:
            return from_texts(column, target)
        except ValueError:
            refused = first_refused(len(column), lambda begin, end: from_texts(column[begin:end], target))
            assert refused is not None  # each text is checked alone
            row, error = refused
            text = " ".join(str(error).split())
            raise Problems(f"{self.place(self.read + row)}{text}; nothing was written") from None


def _inferred(path: str, form: Format) -> "pa.Schema":
    """The columns of a file, with the types of Arrow for the first block, except types that would make
    different texts equal, as numbers or instants can."""
    with bad_rows(path), opened(path, form) as file:
        columns, _ = batches_of(file, form, lambda names: {})
    kinds = {field.name: field.type for field in columns}
    if len(kinds) < len(columns):  # two columns have the same name, which is refused later
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
    return pa.schema([(name, _lossless_type(kind, texts.column(name))) for name, kind in kinds.items()])


def _lossless_type(of: "pa.DataType", texts: Any) -> "pa.DataType":
    """The type for a column that Arrow reads as `of`."""
    if pa.types.is_integer(of) or pa.types.is_floating(of):
        return pa.string() if pa.types.is_string(texts.type) and _loses(of, texts) else of
    return instants_of(of, texts.combine_chunks())


def _loses(of: "pa.DataType", texts: Any) -> bool:
    """Whether numbers would lose something of these texts, like leading zeros, or digits of long integers."""
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
        raise Problems(f"{path}: no column {missing[0]!r}: the fields of the value are {', '.join(fields)}")
    if others := [name for name in layout.val if name not in fields]:
        text = f"{path}: column {others[0]!r} is no field of the value: the fields are {', '.join(fields)}"
        raise Problems(text)


def _table(batch: Any) -> "pa.Table":
    return pa.Table.from_batches([batch]) if isinstance(batch, pa.RecordBatch) else batch


def _in_micros(table: "pa.Table") -> "pa.Table":
    """The table with microseconds for nanoseconds; Arrow's error if it would lose digits."""
    fields = pa.schema([in_micros(field) for field in table.schema])
    return table if fields.equals(table.schema) else table.cast(fields)
