"""The rows of a part that no state names, for a search for what is left of erased rows. Without the state
there is no checksum: the file itself says what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from aiopersist.base.errors import Corruption
from aiopersist.data.lazy import pa, pq
from aiopersist.data.part.part import as_stored
from aiopersist.data.refusal import Refusal
from aiopersist.data.types.evolve import adapt
from aiopersist.data.types.schema import Schema


def iter_rows(
    data: bytes, schemas: Sequence[Schema[Any, Any, Any]], to: Schema[Any, Any, Any]
) -> Iterator[pa.Table]:
    """The rows, row group by row group, in the schema `to`. `schemas` are those of the shard. `Corruption`
    unless the data is a part of one of them."""
    try:
        file = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False)
        written = next(s for s in schemas if _alike(s.arrow_schema, file.schema_arrow))
        for number in range(file.num_row_groups):
            table = as_stored(file.read_row_group(number, use_threads=False), written.arrow_schema)
            yield adapt(table, to)
    except StopIteration:
        raise Corruption("a part has columns that no schema of its shard has") from None
    except (pa.ArrowException, Refusal, OSError, KeyError, ValueError) as e:
        raise Corruption(f"a part cannot be read: {e}") from e


def _alike(one: pa.Schema, other: pa.Schema) -> bool:
    return [(f.name, _shape(f.type)) for f in one] == [(f.name, _shape(f.type)) for f in other]


def _shape(of: pa.DataType) -> Any:
    """The type without the units of times: Parquet has no seconds."""
    if pa.types.is_struct(of):
        return [(field.name, _shape(field.type)) for field in of]
    if pa.types.is_list(of):
        return [_shape(of.value_type)]
    return "temporal" if pa.types.is_temporal(of) else of
