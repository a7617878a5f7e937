"""Inline parts of a few plain rows, without Arrow.

Arrow makes columns of ten rows, and a message of them, in 20 us if the caches are warm; after a wait they are
not. Messages with the same schema and number of rows differ only in the body, its length, and the places of
its buffers. So Arrow makes one message of sample rows, and this *template* makes the others, in a third of
the time. Their bytes are those that Arrow would write: a template is used only if it also makes the message
that Arrow makes of other sample rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any, NamedTuple

from aiopersist.data.arrays import Buffers, assembled
from aiopersist.data.lazy import pa
from aiopersist.data.part.inline import encode_inline
from aiopersist.data.types.schema import PlainTypes

ALIGNMENT = 8  # bytes, to which Arrow pads a buffer
SAMPLES = (3, 0, 20)  # bytes of each text in the sample rows

_PADDING = [b"\0" * size for size in range(ALIGNMENT)]
_LENGTH = Struct("<q")


class Template(NamedTuple):
    """The bytes that all messages with the same number of rows share."""

    metadata: bytes
    """The bytes before the body."""
    places_at: int
    """The offset of the places of the buffers in the head."""
    length_at: int
    """The offset of the length of the body in the head."""

    def message(self, columns: Sequence[Buffers]) -> bytes:
        """The message of these columns."""
        places, body, length = _laid_out(columns)
        metadata = bytearray(self.metadata)
        metadata[self.places_at : self.places_at + len(places)] = places
        _LENGTH.pack_into(metadata, self.length_at, length)
        return b"".join((metadata, *body))


def template_of(plain: PlainTypes, schema: pa.Schema, rows: int) -> Template | None:
    """The template for so many rows, made once; `None` if Arrow writes messages of another form."""
    if rows not in plain.templates:
        plain.templates[rows] = _tested_template(plain, schema, rows) if plain.encoders else None
    template: Template | None = plain.templates[rows]
    return template


def batch_of(columns: Sequence[Buffers], schema: pa.Schema, rows: int) -> pa.RecordBatch:
    """The columns as a record batch of Arrow."""
    arrays = [assembled(t, rows, buffers) for t, buffers in zip(schema.types, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _tested_template(plain: PlainTypes, schema: pa.Schema, rows: int) -> Template | None:
    assert plain.encoders is not None
    samples = []
    for width in SAMPLES:
        made_up: dict[type, Any] = {bytes: b"x" * width, str: "x" * width, int: 0}
        values = [[made_up[kind]] * rows for kind in plain.kinds]
        columns = [encode(column) for encode, column in zip(plain.encoders, values, strict=True)]
        samples.append((columns, encode_inline(batch_of(columns, schema, rows))))
    template = _learned(*samples[0])
    is_sound = template is not None and all(template.message(columns) == data for columns, data in samples)
    return template if is_sound else None


def _learned(columns: Sequence[Buffers], data: bytes) -> Template | None:
    """The template of the message that Arrow made of these columns."""
    places, _, length = _laid_out(columns)
    metadata = data[: len(data) - length]
    rest = metadata.replace(places, b"\xff" * len(places))
    length_of_body = _LENGTH.pack(length)
    if metadata.count(places) != 1 or rest.count(length_of_body) != 1:
        return None
    return Template(metadata, metadata.index(places), rest.index(length_of_body))


def _laid_out(columns: Sequence[Buffers]) -> tuple[bytes, list[bytes], int]:
    """Where each buffer begins, and its length; the buffers with their padding, and their length. The buffer
    of validity, which comes first in each column, is empty: there are no nulls."""
    places: list[int] = []
    body: list[bytes] = []
    at = 0
    for column in columns:
        places += (at, 0)
        for data in column:
            size = len(data)
            padding = -size % ALIGNMENT
            places += (at, size)
            body += (data, _PADDING[padding])
            at += size + padding
    return _places(len(places)).pack(*places), body, at


_structs: dict[int, Struct] = {}


def _places(count: int) -> Struct:
    if count not in _structs:
        _structs[count] = Struct(f"<{count}q")
    return _structs[count]
