"""`aiopersist get`, `put` and `rm`: single entries of tables, with keys and values as texts."""

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
from aiopersist.cli.texts import bytes_of, from_texts, type_name
from aiopersist.cli.when import as_of_option, complete_times, read_time
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
        handle, schema = await opened_table(client, table)
        time = as_of_option(as_of)
        with complete_times(table, time):
            at = await read_time(run, client, table, time)
            val = await handle.get(key_of(key, schema), as_of=at)
    if val is None:
        raise Problems(f"{table} has no key {key}")
    run.line(pydantic_core.from_json(as_json(val)))


async def put(
    run: Invocation,
    table: ShardName,
    key: KeyText,
    val: Annotated[str, typer.Argument(metavar="JSON", help="The value; - reads standard input.")],
) -> None:
    """Set the value of a key."""
    async with run.writing() as client:
        handle, schema = await opened_table(client, table)
        text = standard_input().read().decode(errors="surrogateescape") if val == "-" else val
        time = await handle.put(key_of(key, schema), val_of(text, schema))
    run.tell({"table": table, "time": time}, f"{table}: written at {shown_time(time, Clock.WALL)}")


async def rm(
    run: Invocation,
    table: ShardName,
    keys: Annotated[list[str], typer.Argument(metavar="KEY", help="Keys, as for get.")],
) -> None:
    """Delete keys, all in one commit."""
    async with run.writing() as client:
        handle, schema = await opened_table(client, table)
        texts = {key_of(text, schema): text for text in keys}

        async def body(tx: Transaction) -> list[Any]:
            present = await tx.get_many(handle, list(texts))
            tx.delete(handle, *present)
            return list(present)

        present = await client.transact(body)
    assert isinstance(present, list)
    missing = [text for key, text in texts.items() if key not in present]
    result = {"table": table, "deleted": len(present), "missing": missing}
    run.tell(result, f"{table}: {counted(len(present), 'key')} deleted")
    if missing:
        raise Problems(f"{table} has no key {', '.join(missing)}")


async def opened_table(client: Client, name: str) -> tuple[Table[Any, Any], Schema[Any, Any, Any]]:
    """A handle of an existing table with its stored types, not resident; and its schema."""
    _, schema = await client.schema(name)
    if not (await client.admin.inspect(name)).table:
        raise InvalidUsage(UsageKind.NOT_A_TABLE, f"{name!r} is no table")
    key, val = schema.key.arrow("key"), schema.val.arrow("val")
    return client.table(name, key_type(key), val, resident=False), schema


@cache
def key_type(field: "pa.Field") -> Any:
    """The Python type of keys: structs are named tuples, since dicts are not hashable."""
    if not pa.types.is_struct(field.type):
        return field
    names = [inner.name for inner in field.type]
    make: Any = namedtuple  # its types are known only at run time
    try:
        key_class = make("Key", names)
    except ValueError as error:
        raise CannotBegin(f"this command cannot use keys with the columns {names}: {error}") from None
    key_class.__annotations__ = {inner.name: key_type(inner) for inner in field.type}
    return key_class


def key_of(text: str, schema: Schema[Any, Any, Any]) -> Any:
    """The key in a text."""
    check_utf8("KEY", text)
    field, is_ = schema.key.arrow("key"), pa.types
    of = field.type
    is_json = is_.is_struct(of) or is_.is_boolean(of) or is_.is_floating(of) or is_.is_integer(of)
    return _value(_json("KEY", text, of) if is_json else text, field, frozen=True)


def val_of(text: str, schema: Schema[Any, Any, Any]) -> Any:
    """The value in JSON."""
    check_utf8("val", text)
    field = schema.val.arrow("val")
    return _value(_json("val", text, field.type), field)


def check_utf8(what: str, text: str) -> None:
    """`CannotBegin` for bytes of the command line that are no UTF-8; Python turns them into surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CannotBegin(f"{what} {text[:80]!r} is no UTF-8") from None


def _json(what: str, text: str, of: "pa.DataType") -> Any:
    """The value of a text of JSON; numbers with a fraction become decimals, since a float would round them.
    `CannotBegin` names the expected type."""
    try:
        pydantic_core.from_json(text)  # it refuses surrogates and deep nesting
        return json.loads(text, parse_float=Decimal)
    except (ValueError, ArithmeticError, RecursionError) as error:
        if pa.types.is_nested(of):
            raise CannotBegin(f"{what}: expected JSON of a {of}, got {text[:80]!r}: {error}") from None
        quoted = f": write texts in double quotes, as in JSON: '\"{text[:80]}\"'"
        is_text = pa.types.is_string(of) or pa.types.is_temporal(of)
        got = f"{text[:80]!r}{quoted if is_text else ''}"
        raise CannotBegin(f"{what}: expected {type_name(of)}, got {got}") from None


def _value(value: Any, field: "pa.Field", *, frozen: bool = False) -> Any:
    """A value of JSON as a value of the column; types that JSON lacks are texts, as `cat` writes them."""
    of, is_ = field.type, pa.types
    if value is None:
        if field.nullable:
            return None
        raise _refusal(value, field)
    if is_.is_struct(of):
        return _struct(value, field, frozen=frozen)
    if is_.is_list(of):
        if not isinstance(value, list):
            raise _refusal(value, field)
        return [_value(item, of.value_field) for item in value]
    try:
        return _leaf(value, of)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):
        raise _refusal(value, field) from None


def _struct(value: Any, field: "pa.Field", *, frozen: bool) -> Any:
    if not isinstance(value, dict):
        raise _refusal(value, field)
    inner = {child.name: child for child in field.type}
    if unknown := value.keys() - inner.keys():
        raise CannotBegin(f"{field.name} has no {min(unknown)!r}; there are {', '.join(inner)}")
    if missing := [n for n, child in inner.items() if n not in value and not child.nullable]:
        raise CannotBegin(f"{field.name} needs {missing[0]!r}")
    values = {name: _value(value.get(name), child, frozen=frozen) for name, child in inner.items()}
    return key_type(field)(**values) if frozen else values


def _leaf(value: Any, of: "pa.DataType") -> Any:
    is_ = pa.types
    if is_bytes(of):
        return _bytes(value, of)
    if isinstance(value, bool) is not is_.is_boolean(of) or isinstance(value, list | dict):
        raise TypeError
    if isinstance(value, str):
        if is_.is_integer(of):
            raise TypeError
        return from_texts(pa.array([value]), of)[0].cast(of).as_py()
    if is_.is_decimal(of):
        return pa.scalar(str(value)).cast(of).as_py()
    if is_.is_floating(of):
        return _float(value, of)
    if not (is_.is_integer(of) or is_.is_boolean(of)) or isinstance(value, float | Decimal):
        raise TypeError  # Arrow would drop the fraction
    return pa.scalar(value, of).as_py()


def _float(value: float | Decimal, of: "pa.DataType") -> Any:
    """The nearest number of a float column; `OverflowError` if too large. Only NaN and infinities are floats
    here."""
    nearest = pa.scalar(float(value), of).as_py()
    if not isinstance(value, float) and not isfinite(nearest):
        raise OverflowError
    if isinstance(value, int) and nearest != value:
        raise OverflowError  # the integer is between two floats
    return nearest


def _bytes(value: Any, of: "pa.DataType") -> bytes:
    """The bytes of a text; a UUID may be written with hyphens."""
    if not isinstance(value, str):
        raise TypeError
    width = of.byte_width if pa.types.is_fixed_size_binary(of) else None
    data = UUID(value).bytes if width == UUID_BYTES and len(value) > 2 * UUID_BYTES else bytes_of(value)
    if width not in (None, len(data)):
        raise ValueError
    return data


def _refusal(value: Any, field: "pa.Field") -> CannotBegin:
    return CannotBegin(f"{field.name}: expected {type_name(field.type)}, got {str(as_json(value))[:80]}")
