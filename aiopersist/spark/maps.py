"""Maps, which shards have no type for: they are stored as lists of `(key, value)` structs, sorted by key, so
equal maps are equal lists. The schema records that such a list is a map, by its path, like an own codec.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.data.lazy import pa, pc

NAME = "map"  # in the shard's schema, as the name of a codec


def stored_type(t: pa.DataType, path: str, maps: dict[str, str]) -> pa.DataType:
    """`t` with lists for maps; adds their paths to `maps`. `INVALID_COLUMN` if the keys have no order."""
    is_ = pa.types
    if is_.is_map(t):
        if is_.is_nested(t.key_type):
            text = f"column {path!r}: the keys of a map are {t.key_type}, which have no order"
            raise InvalidUsage(UsageKind.INVALID_COLUMN, text, column=path)
        maps[path] = NAME
        entry = pa.struct(
            [
                pa.field("key", t.key_type, nullable=False),
                pa.field("value", stored_type(t.item_type, f"{path}.element.value", maps)),
            ]
        )
        return pa.list_(pa.field("element", entry, nullable=False))
    if is_.is_struct(t):
        return pa.struct([f.with_type(stored_type(f.type, f"{path}.{f.name}", maps)) for f in t])
    if is_.is_list(t):
        element = t.value_field
        inner = stored_type(element.type, f"{path}.element", maps)
        return pa.list_(pa.field("element", inner, nullable=element.nullable))
    return t


def shown_type(t: pa.DataType, path: str, own: Mapping[str, str]) -> pa.DataType:
    """The inverse of `stored_type`: the type with maps instead of lists."""
    is_ = pa.types
    if is_.is_list(t):
        inner = shown_type(t.value_type, f"{path}.element", own)
        if own.get(path) == NAME and is_.is_struct(inner) and [f.name for f in inner] == ["key", "value"]:
            return pa.map_(inner[0].type, inner[1].type)
        return pa.list_(t.value_field.with_type(inner))
    if is_.is_struct(t):
        return pa.struct([f.with_type(shown_type(f.type, f"{path}.{f.name}", own)) for f in t])
    return t


def has_map(t: pa.DataType) -> bool:
    """Whether the type contains a map, at any depth."""
    if pa.types.is_map(t):
        return True
    return pa.types.is_nested(t) and any(has_map(t.field(i).type) for i in range(t.num_fields))


def as_lists(array: Any) -> Any:
    """An array with its maps as sorted lists of structs."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    t = array.type
    if not has_map(t):
        return array
    mask = array.is_null() if array.null_count else None
    if pa.types.is_struct(t):
        children = [as_lists(child) for child in array.flatten()]
        fields = [f.with_type(child.type) for f, child in zip(t, children, strict=True)]
        return pa.StructArray.from_arrays(children, fields=fields, mask=mask)
    lengths = pc.fill_null(pc.list_value_length(array), 0) if not pa.types.is_map(t) else _map_lengths(array)
    entries = as_lists(_entries(array)) if pa.types.is_map(t) else as_lists(array.flatten())
    if pa.types.is_map(t):
        entries = _sorted(entries, lengths)
    element = pa.field("element", entries.type, nullable=not pa.types.is_map(t))
    return pa.ListArray.from_arrays(_offsets(lengths), entries, type=pa.list_(element), mask=mask)


def as_maps(array: Any, target: pa.DataType) -> Any:
    """An array in the target type, with maps for lists. It does not use Arrow's cast of nested types, which
    makes invalid lists of nulls."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if array.type == target:
        return array
    if not pa.types.is_nested(target):
        return array.cast(target)
    mask = array.is_null() if array.null_count else None
    if pa.types.is_struct(target):
        children = [as_maps(c, f.type) for c, f in zip(array.flatten(), target, strict=True)]
        return pa.StructArray.from_arrays(children, fields=list(target), mask=mask)
    offsets = _offsets(pc.fill_null(pc.list_value_length(array), 0))
    if not pa.types.is_map(target):
        elements = as_maps(array.flatten(), target.value_type)
        return pa.ListArray.from_arrays(offsets, elements, type=target, mask=mask)
    keys, values = array.flatten().flatten()
    keys, values = as_maps(keys, target.key_type), as_maps(values, target.item_type)
    maps = pa.MapArray.from_arrays(offsets, keys, values, type=target)
    return maps if mask is None else pc.if_else(mask, pa.scalar(None, target), maps)


def _offsets(lengths: Any) -> Any:
    ends = pc.cumulative_sum(lengths).cast(pa.int32())
    return pa.concat_arrays([pa.array([0], pa.int32()), ends])


def _map_lengths(array: Any) -> Any:
    lengths = pc.subtract(array.offsets[1:], array.offsets[:-1])
    return pc.if_else(array.is_valid(), lengths, pa.scalar(0, pa.int32()))


def _entries(array: Any) -> Any:
    """The entries of all maps, one after the other."""
    t = array.type
    fields = [pa.field("key", t.key_type, nullable=False), pa.field("value", t.item_type)]
    start, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
    keys, items = (half.slice(start, end - start) for half in (array.keys, array.items))
    if array.null_count:  # a null map may have entries
        parents = pc.list_parent_indices(pa.ListArray.from_arrays(array.offsets, array.keys))
        is_present = pc.take(array.is_valid(), parents)
        keys, items = keys.filter(is_present), items.filter(is_present)
    return pa.StructArray.from_arrays([keys, items], fields=fields)


def _sorted(entries: Any, lengths: Any) -> Any:
    """The entries, sorted by key within each map."""
    parents = pc.list_parent_indices(
        pa.ListArray.from_arrays(_offsets(lengths), pa.nulls(len(entries), pa.int8()))
    )
    keys = pc.struct_field(entries, [0])
    order = pc.sort_indices(
        pa.table([parents, keys], ["map", "key"]), [("map", "ascending"), ("key", "ascending")]
    )
    return entries.take(order)
