"""`aiopersist get`, `put`, `rm`: single entries of tables, by keys and values as texts."""

import json
from collections import namedtuple
from decimal import Decimal
from functools import cache
from math import isfinite
from typing import Annotated, Any
from uuid import UUID

import pydantic_core
import typer

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.cli.cat import AsOf
from aiopersist.cli.command import CannotBegin, Invocation, Problems
from aiopersist.cli.files import standard_input
from aiopersist.cli.formats import as_json
from aiopersist.cli.names import ShardName
from aiopersist.cli.shown import counted, shown_time
from aiopersist.cli.texts import bytes_of, from_texts, said
from aiopersist.cli.when import as_of_option, complete_times, known_time
from aiopersist.client.client import Client
from aiopersist.data.lazy import pa
from aiopersist.data.types.schema import Schema
from aiopersist.state.model import Clock
from aiopersist.table.table import Table
from aiopersist.table.transaction.transaction import Transaction
from aiopersist.web.rows import is_bytes

UUID_BYTES = 16

KeyText = Annotated[str, typer.Argument(metavar="KEY", help="A text, a number, or JSON of a struct.")]


async def get(run: Invocation, table: ShardName, key: KeyText, as_of: AsOf = None) -> None:
    """Write the value of a key as JSON."""
    async with run.reading() as client:
        found, schema = await opened_table(client, table)
        time = as_of_option(as_of)
        with complete_times(table, time):
            at = await known_time(run, client, table, time)
            val = await found.get(key_of(key, schema), as_of=at)
    if val is None:
        raise Problems(f"{table} has no key {key}")
    run.line(pydantic_core.from_json(as_json(val)))


async def put(
    run: Invocation,
    table: ShardName,
    key: KeyText,
    val: Annotated[str, typer.Argument(metavar="JSON", help="The val; - reads it from standard input.")],
) -> None:
    """Give a key its value."""
    async with run.writing() as client:
        found, schema = await opened_table(client, table)
        text = standard_input().read().decode(errors="surrogateescape") if val == "-" else val
        time = await found.put(key_of(key, schema), val_of(text, schema))
    run.tell({"table": table, "time": time}, f"{table}: in at {shown_time(time, Clock.WALL)}")


async def rm(
    run: Invocation,
    table: ShardName,
    keys: Annotated[list[str], typer.Argument(metavar="KEY", help="Keys, as for get.")],
) -> None:
    """Delete keys, all at one time."""
    async with run.writing() as client:
        found, schema = await opened_table(client, table)
        wanted = {key_of(text, schema): text for text in keys}

        async def body(tx: Transaction) -> list[Any]:
            there = await tx.get_many(found, list(wanted))
            tx.delete(found, *there)
            return list(there)

        there = await client.transact(body)
    assert isinstance(there, list)
    missing = [text for key, text in wanted.items() if key not in there]
    result = {"table": table, "deleted": len(there), "missing": missing}
    run.tell(result, f"{table}: {counted(len(there), 'key')} deleted")
    if missing:
        raise Problems(f"{table} has no key {', '.join(missing)}")


async def opened_table(client: Client, name: str) -> tuple[Table[Any, Any], Schema[Any, Any, Any]]:
    """The table that is there, by its stored types; it reads only what is asked of it."""
    _, schema = await client.schema(name)
    if not (await client.admin.inspect(name)).table:
        raise InvalidUsage(UsageKind.NOT_A_TABLE, f"{name!r} is no table")
    key, val = schema.key.arrow("key"), schema.val.arrow("val")
    return client.table(name, key_type(key), val, resident=False), schema


@cache
def key_type(field: "pa.Field") -> Any:
    """The Python type of keys: structs are tuples with names, since dicts cannot be looked up."""
    if not pa.types.is_struct(field.type):
        return field
    names = [inner.name for inner in field.type]
    make: Any = namedtuple  # the types are known at run time
    try:
        made = make("Key", names)
    except ValueError as error:
        raise CannotBegin(f"this command cannot make keys of the columns {names}: {error}") from None
    made.__annotations__ = {inner.name: key_type(inner) for inner in field.type}
    return made


def key_of(text: str, schema: Schema[Any, Any, Any]) -> Any:
    """The key that a text stands for."""
    check_utf8("KEY", text)
    field, is_ = schema.key.arrow("key"), pa.types
    of = field.type
    is_json = is_.is_struct(of) or is_.is_boolean(of) or is_.is_floating(of) or is_.is_integer(of)
    return _value(_json("KEY", text, of) if is_json else text, field, frozen=True)


def val_of(text: str, schema: Schema[Any, Any, Any]) -> Any:
    """The value that JSON stands for."""
    check_utf8("val", text)
    field = schema.val.arrow("val")
    return _value(_json("val", text, field.type), field)


def check_utf8(what: str, text: str) -> None:
    """`CannotBegin` for bytes of the command line that are no UTF-8: Python makes lone surrogates of them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CannotBegin(f"{what} {text[:80]!r} is no UTF-8") from None


def _json(what: str, text: str, of: "pa.DataType") -> Any:
    """What JSON says, numbers with a fraction as decimals: a float would round them. `CannotBegin` tells what
    it should be."""
    try:
        pydantic_core.from_json(text)  # it refuses lone surrogates, and what is nested too deep
        return json.loads(text, parse_float=Decimal)
    except (ValueError, ArithmeticError, RecursionError) as error:
        if pa.types.is_nested(of):
            raise CannotBegin(f"{what}: expected JSON of a {of}, got {text[:80]!r}: {error}") from None
        quoted = f": a text stands in double quotes, as JSON has it: '\"{text[:80]}\"'"
        is_text = pa.types.is_string(of) or pa.types.is_temporal(of)
        got = f"{text[:80]!r}{quoted if is_text else ''}"
        raise CannotBegin(f"{what}: expected {said(of)}, got {got}") from None


def _value(given: Any, field: "pa.Field", *, frozen: bool = False) -> Any:
    """A value of JSON as one of the column; texts stand for what JSON does not have, as `cat` writes it."""
    of, is_ = field.type, pa.types
    if given is None:
        if field.nullable:
            return None
        raise _no(given, field)
    if is_.is_struct(of):
        return _struct(given, field, frozen=frozen)
    if is_.is_list(of):
        if not isinstance(given, list):
            raise _no(given, field)
        return [_value(item, of.value_field) for item in given]
    try:
        return _leaf(given, of)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        raise _no(given, field) from None


def _struct(given: Any, field: "pa.Field", *, frozen: bool) -> Any:
    if not isinstance(given, dict):
        raise _no(given, field)
    inner = {child.name: child for child in field.type}
    if unknown := given.keys() - inner.keys():
        raise CannotBegin(f"{field.name} has no {min(unknown)!r}; there are {', '.join(inner)}")
    if missing := [n for n, child in inner.items() if n not in given and not child.nullable]:
        raise CannotBegin(f"{field.name} lacks {missing[0]!r}")
    values = {name: _value(given.get(name), child, frozen=frozen) for name, child in inner.items()}
    return key_type(field)(**values) if frozen else values


def _leaf(given: Any, of: "pa.DataType") -> Any:
    is_ = pa.types
    if is_bytes(of):
        return _bytes(given, of)
    if isinstance(given, bool) is not is_.is_boolean(of) or isinstance(given, list | dict):
        raise TypeError
    if isinstance(given, str):
        if is_.is_integer(of):
            raise TypeError
        return from_texts(pa.array([given]), of)[0].cast(of).as_py()
    if is_.is_decimal(of):
        return pa.scalar(str(given)).cast(of).as_py()
    if is_.is_floating(of):
        return _float(given, of)
    if not (is_.is_integer(of) or is_.is_boolean(of)) or isinstance(given, float | Decimal):
        raise TypeError  # Arrow would cut a fraction off
    return pa.scalar(given, of).as_py()


def _float(given: float | Decimal, of: "pa.DataType") -> Any:
    """The nearest number of a float column; `OverflowError` for one that is too large for it. JSON makes no
    floats here but NaN and the infinities, which are what they are."""
    found = pa.scalar(float(given), of).as_py()
    if not isinstance(given, float) and not isfinite(found):
        raise OverflowError
    if isinstance(given, int) and found != given:
        raise OverflowError  # an integer between two floats
    return found


def _bytes(given: Any, of: "pa.DataType") -> bytes:
    """Those of a column; a UUID may be written as one."""
    if not isinstance(given, str):
        raise TypeError
    width = of.byte_width if pa.types.is_fixed_size_binary(of) else None
    found = UUID(given).bytes if width == UUID_BYTES and len(given) > 2 * UUID_BYTES else bytes_of(given)
    if width not in (None, len(found)):
        raise ValueError
    return found


def _no(given: Any, field: "pa.Field") -> CannotBegin:
    return CannotBegin(f"{field.name}: expected {said(field.type)}, got {str(as_json(given))[:80]}")
