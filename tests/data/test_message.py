"""Goal: a message that was made after a template is the one that Arrow writes, to the last byte."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiopersist import Schema
from aiopersist.data.part import message
from aiopersist.data.part.inline import decode_inline, encode_inline
from aiopersist.data.types.schema import plain_types
from aiopersist.data.updates.tiny import TINY_ROWS, tiny

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
VALUES: dict[Any, st.SearchStrategy[Any]] = {
    bytes: st.binary(max_size=70),
    str: TEXTS,
    int: st.integers(-(2**63), 2**63 - 1),
    pa.large_binary(): st.binary(max_size=70),
    pa.large_string(): TEXTS,
}
SCHEMAS = {(key, val): Schema(key=key, val=val) for key in VALUES for val in VALUES}


@given(st.data(), st.sampled_from(list(SCHEMAS)))
def test_the_bytes_are_those_of_arrow(data: st.DataObject, kinds: tuple[Any, Any]) -> None:
    schema, (key, val) = SCHEMAS[kinds], kinds
    numbers = st.tuples(st.integers(0, 2**63 - 2), st.integers(-(2**63), 2**63 - 1))
    row = st.builds(lambda k, v, numbers: (k, v, *numbers), VALUES[key], VALUES[val], numbers)
    made = tiny(data.draw(st.lists(row, min_size=1, max_size=40)), schema)
    if made is None or not made.rows:
        return
    plain = plain_types(schema)
    assert plain is not None and message.template_of(plain, schema.arrow_schema, made.rows) is not None
    assert made.message() == encode_inline(made.batch)
    assert decode_inline(made.message(), schema, None).equals(pa.Table.from_batches([made.batch]))


def test_any_number_of_rows() -> None:
    schema = Schema(key=str, val=int)
    for rows in range(1, TINY_ROWS + 1):
        made = tiny([(f"{at:03}", at, at, 1) for at in range(rows)], schema)
        assert made is not None and made.rows == rows
        assert made.message() == encode_inline(made.batch)
    assert plain_types(schema).templates.keys() == set(range(1, TINY_ROWS + 1))  # type: ignore[union-attr]


@pytest.mark.parametrize("unknown", ["alignment", "places"])
def test_what_arrow_writes_otherwise_is_left_to_it(unknown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: another version of Arrow may lay out its messages in another way."""
    if unknown == "alignment":
        monkeypatch.setattr(message, "ALIGNMENT", 64)
        monkeypatch.setattr(message, "_PADDING", [b"\0" * size for size in range(64)])
    else:
        learned = message._learned

        def other(*sample: Any) -> message.Template | None:
            found = learned(*sample)
            return found and found._replace(places_at=found.places_at + 8)

        monkeypatch.setattr(message, "_learned", other)
    schema = Schema(key=bytes, val=str)
    made, plain = tiny([(b"k", "v", 3, 1)], schema), plain_types(schema)
    assert made is not None and plain is not None
    assert message.template_of(plain, schema.arrow_schema, 1) is None
    assert made.message() == encode_inline(made.batch)


def test_types_of_which_arrow_makes_columns() -> None:
    schema = Schema(key=pa.int32(), val=str)
    made = tiny([(1, "v", 3, 1)], schema)
    assert made is not None and isinstance(made.columns, pa.RecordBatch)
    assert made.message() == encode_inline(made.batch)
