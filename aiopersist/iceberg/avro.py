"""Avro container files, as far as Iceberg's manifests need them: records, optional values, lists, maps."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from hashlib import sha256
from json import dumps
from typing import Any

Type = str | list[Any] | dict[str, Any]
"""A type in Avro's JSON. A list is an optional value: `["null", T]`."""

RAW_DEFLATE = -15  # without a header


def container(
    schema: dict[str, Any], rows: Sequence[Mapping[str, Any]], metadata: Mapping[str, str]
) -> bytes:
    """A file with these records and these entries in its header. Equal records give equal bytes."""
    block = bytearray()
    for row in rows:
        _put(schema, row, block)
    sync = sha256(block).digest()[:16]
    out = bytearray(b"Obj\x01")
    header = {"avro.schema": dumps(schema), "avro.codec": "deflate", **metadata}
    _put({"type": "map", "values": "bytes"}, {name: text.encode() for name, text in header.items()}, out)
    out += sync
    if rows:
        compress = zlib.compressobj(wbits=RAW_DEFLATE)
        data = compress.compress(bytes(block)) + compress.flush()
        _put("long", len(rows), out)
        _put("bytes", data, out)
        out += sync
    return bytes(out)


def optional(t: Type) -> Type:
    """The type of values of type `t` that may be absent."""
    return ["null", t]


def field(name: str, t: Type, id: int) -> dict[str, Any]:
    """A field of a record, with Iceberg's id."""
    default = {"default": None} if isinstance(t, list) else {}
    return {"name": name, "type": t, "field-id": id, **default}


def record(name: str, *fields: dict[str, Any]) -> dict[str, Any]:
    """The type of a record."""
    return {"type": "record", "name": name, "fields": list(fields)}


def by_number(key_id: int, value_id: int, t: Type) -> Type:
    """The type of a map from integers: Avro's own maps have texts as keys."""
    entry = record(f"k{key_id}_v{value_id}", field("key", "int", key_id), field("value", t, value_id))
    return {"type": "array", "logicalType": "map", "items": entry}


def _put(t: Type, value: Any, out: bytearray) -> None:
    if isinstance(t, list):
        _put_long(0 if value is None else 1, out)
        if value is not None:
            _put(t[1], value, out)
        return
    kind = t if isinstance(t, str) else t["type"]
    match kind:
        case "int" | "long":
            _put_long(value, out)
        case "boolean":
            out.append(bool(value))
        case "string":
            _put_bytes(value.encode(), out)
        case "bytes":
            _put_bytes(value, out)
        case _:
            assert isinstance(t, dict)
            _put_composite(t, value, out)


def _put_composite(t: dict[str, Any], value: Any, out: bytearray) -> None:
    if t["type"] == "record":
        for each in t["fields"]:
            _put(each["type"], value.get(each["name"]), out)
        return
    if t["type"] == "map":
        t, value = _entries(t["values"]), [{"key": k, "value": v} for k, v in value.items()]
    elif t.get("logicalType") == "map":
        value = [{"key": k, "value": v} for k, v in sorted(value.items())]
    if value:
        _put_long(len(value), out)
        for item in value:
            _put(t["items"], item, out)
    _put_long(0, out)


def _entries(values: Type) -> dict[str, Any]:
    """The type of a list with the bytes of a map of Avro."""
    fields = [{"name": "key", "type": "string"}, {"name": "value", "type": values}]
    return {"type": "array", "items": {"type": "record", "fields": fields}}


def _put_long(n: int, out: bytearray) -> None:
    n = (n << 1) ^ (n >> 63)
    while n & ~0x7F:
        out.append((n & 0x7F) | 0x80)
        n >>= 7
    out.append(n)


def _put_bytes(data: bytes, out: bytearray) -> None:
    _put_long(len(data), out)
    out += data
