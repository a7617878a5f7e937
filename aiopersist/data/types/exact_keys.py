"""Keys that come back equal to the stored ones. Pure.

Two types keep less than Python's values have, so two keys could become one, or one could become two:

- A 32-bit float keeps the nearest float.
- A moment with a zone keeps the instant. In an hour that a zone has twice, or skips, Python takes two
  instants for equal, and neither for equal to the same instant in UTC.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiopersist.base.errors import shown
from aiopersist.data.refusal import Refusal
from aiopersist.data.types.codec import Codec, Field, Plain, Timestamps
from aiopersist.data.types.nested import Structs


def are_exact(field: Field) -> bool:
    """Whether all values of the field, except NaN, come back equal."""
    if isinstance(field.codec, Structs):
        return all(map(are_exact, field.codec.fields.values()))
    return not _keeps_less(field.codec)


def check_exact(field: Field, values: Sequence[Any]) -> None:
    """`Refusal` of the first value that does not come back equal. All are values of the field."""
    codec = field.codec
    if isinstance(codec, Structs):
        for name, inner in codec.fields.items():
            get = codec.getter(name)
            check_exact(inner, [None if value is None else get(value) for value in values])
    elif _keeps_less(codec):
        for row, (value, kept) in enumerate(zip(values, field.decode(field.encode(values)), strict=True)):
            if kept != value and value == value:  # NaN is not equal to itself
                text = f"{shown(value, 120)} is kept as {shown(kept, 120)}, not equal to it: give that"
                raise Refusal(row, text)


def _keeps_less(codec: Codec) -> bool:
    if isinstance(codec, Timestamps):
        return codec.arrow_type.tz is not None
    return isinstance(codec, Plain) and codec.floating and codec.arrow_type.bit_width < 64
