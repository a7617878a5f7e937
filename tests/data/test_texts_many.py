"""Goal: many values at once are what each of them is by itself, and what a column makes of them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiopersist.data.jsonable import column_from_texts, column_texts
from aiopersist.data.refusal import Refusal
from aiopersist.data.texts import texts_of, values_of
from aiopersist.data.types.schema import Schema
from tests.data.test_texts import ANY, TYPES


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.__name__)
@given(data=st.data())
def test_many_values_are_as_a_column(type_: Any, data: Any) -> None:
    """What it writes is what a column writes, and nothing that a column refuses; it reads what a column
    reads."""
    values = data.draw(st.lists(TYPES[type_], min_size=1, max_size=5) | st.lists(ANY, min_size=1, max_size=3))
    field = Schema(str, type_).val
    texts = texts_of(field, values)
    try:
        expected = column_texts(field.encode(values))
    except Refusal:
        assert texts is None
        return
    assert texts in (None, expected)
    again = field.decode(column_from_texts(expected, field.codec.arrow_type))
    found = values_of(field, expected)
    assert found is None or (repr(found), list(map(type, found))) == (repr(again), list(map(type, again)))


@given(
    texts=st.lists(st.text(st.characters(), max_size=6) | st.sampled_from(["1", "1,2", "{}", "null", '"a"']))
)
@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.__name__)
def test_other_texts_are_left_to_a_column(type_: Any, texts: list[str]) -> None:
    """Damage is told by a column, which checks each value."""
    field = Schema(str, type_).val
    found = values_of(field, texts)
    if texts and found is not None:
        assert found == field.decode(column_from_texts(texts, field.codec.arrow_type))


@pytest.mark.parametrize("type_", [str, int, float, bool])
def test_plain_values_need_no_column(type_: Any) -> None:
    """The tests above would hold if it left everything to columns."""
    values = {str: ["a", 'ü"\\\n'], int: [1, -(2**63)], float: [0.5, 1e300], bool: [True, False]}[type_]
    field = Schema(str, type_).val
    texts = texts_of(field, values * 3000)
    assert texts is not None
    assert values_of(field, texts) == values * 3000
