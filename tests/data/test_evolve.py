"""Goal: what was written under an earlier schema reads as rows of a later one, however deep the new field
lies, and whatever is null or cut off."""

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict

from aiopersist.data.types.evolve import adapt
from aiopersist.data.types.schema import Schema
from aiopersist.data.updates.convert import to_table
from aiopersist.data.updates.updates import Updates


class Old(BaseModel):
    model_config = ConfigDict(frozen=True)
    a: int


class New(BaseModel):
    model_config = ConfigDict(frozen=True)
    a: int
    b: str | None = None


def new(val: Any) -> Any:
    return [new(v) for v in val] if isinstance(val, list) else None if val is None else New(a=val.a)


@pytest.mark.parametrize(
    ("old_type", "new_type", "vals"),
    [
        pytest.param(Old, New, [Old(a=1), Old(a=2), Old(a=3)], id="model"),
        pytest.param(Old | None, New | None, [Old(a=1), None, Old(a=3)], id="optional model"),
        pytest.param(list[Old], list[New], [[Old(a=1), Old(a=2)], [], [Old(a=3)]], id="list"),
        pytest.param(list[Old] | None, list[New] | None, [[Old(a=1)], None, [Old(a=3)]], id="optional list"),
        pytest.param(
            list[list[Old]], list[list[New]], [[[Old(a=1)], []], [], [[Old(a=2)]]], id="list of lists"
        ),
    ],
)
def test_a_new_field_is_none_in_earlier_rows(old_type: Any, new_type: Any, vals: list[Any]) -> None:
    old, later = Schema(key=int, val=old_type), Schema(key=int, val=new_type)
    table = to_table([(n, val, 0, 1) for n, val in enumerate(vals)], old)
    expected = [(n, new(val), 0, 1) for n, val in enumerate(vals)]
    assert [tuple(row) for row in Updates(adapt(table, later), later)] == expected
    assert [tuple(row) for row in Updates(adapt(table.slice(1), later), later)] == expected[1:]
    assert adapt(table, old) is table
