"""Columns of plain values are those of Arrow's own conversion."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiopersist.data.arrays import bool_scalar, empty_table, made_by_buffers, one, plain_array

INTS = st.integers(-(2**63), 2**63 - 1)
TEXTS, BYTES = st.text(st.characters(codec="utf-8")), st.binary()
VALUES = {
    pa.int64(): INTS,
    pa.string(): TEXTS,
    pa.large_string(): TEXTS,
    pa.binary(): BYTES,
    pa.large_binary(): BYTES,
}
OTHERS = [
    pa.null(),
    pa.int32(),
    pa.uint64(),
    pa.binary(3),
    pa.string_view(),
    pa.struct([pa.field("x", pa.string(), nullable=False)]),
    pa.list_(pa.field("element", pa.int64(), nullable=False), 2),
    pa.list_(pa.float64()),
    pa.dictionary(pa.int32(), pa.string()),
    pa.timestamp("us", "UTC"),
]


@pytest.mark.parametrize("t", VALUES, ids=str)
@given(data=st.data())
def test_a_column_is_arrows(t: pa.DataType, data: st.DataObject) -> None:
    values = data.draw(st.lists(VALUES[t], max_size=20))
    ours, theirs = plain_array(values, t), pa.array(values, t)
    ours.validate(full=True)
    assert made_by_buffers(t)
    assert ours.equals(theirs)
    ours, theirs = (pa.record_batch([array], ["c"]).serialize().to_pybytes() for array in (ours, theirs))
    assert not values or ours == theirs


@pytest.mark.parametrize(
    ("value", "t", "error"),
    [
        (2**63, pa.int64(), OverflowError),
        (-(2**63) - 1, pa.int64(), OverflowError),
        ("\ud800", pa.string(), UnicodeError),
    ],
)
def test_what_cannot_be_stored_is_refused(value: Any, t: pa.DataType, error: type[Exception]) -> None:
    with pytest.raises(error):
        plain_array([value], t)


@pytest.mark.parametrize("t", [*VALUES, *OTHERS], ids=str)
def test_a_table_without_rows(t: pa.DataType) -> None:
    schema = pa.schema(
        [pa.field("a", t, nullable=pa.types.is_null(t)), pa.field("b", t, metadata={"of": "b"})]
    )
    table = empty_table(schema)
    table.validate(full=True)
    assert table.equals(schema.empty_table(), check_metadata=True)


@pytest.mark.parametrize("t", [*VALUES, pa.int32(), pa.float64(), pa.timestamp("us")], ids=str)
def test_one_value(t: pa.DataType) -> None:
    value = {pa.string(): "é", pa.large_string(): "é", pa.binary(): b"x", pa.large_binary(): b"x"}.get(t, 7)
    assert one(value, t).equals(pa.array([value], t))
    assert one(None, t).equals(pa.array([None], t))


def test_a_bool() -> None:
    assert [bool_scalar(value).as_py() for value in (True, False)] == [True, False]
