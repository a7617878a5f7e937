"""Goal: a feed and a subscription of a table give Python values, so a table takes no others: Arrow data has
points in time and durations that Python has not."""

import datetime as dt
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

import aiopersist as ap

FAR = 2**62  # microseconds: a year beyond 9999
MOMENT = pa.timestamp("us", "UTC")


class Stay(NamedTuple):
    guest: str
    nights: list[dt.date]


def far(t: pa.DataType) -> pa.Array:
    """A value that Python has, and one that it has not."""
    width = pa.int32() if t.bit_width == 32 else pa.int64()
    return pa.array([5, FAR if t.bit_width == 64 else 2**31 - 1], width).cast(t)


def stays() -> pa.Array:
    nights = pa.ListArray.from_arrays([0, 1, 2], far(pa.date32()))
    return pa.StructArray.from_arrays([pa.array(["ada", "bob"]), nights], ["guest", "nights"])


VALS = [
    (dt.datetime, far(MOMENT), "val: timestamp"),
    (dt.date, far(pa.date32()), "val: date32"),
    (pa.timestamp("s"), pa.array([-5, -(10**15)], pa.int64()).cast(pa.timestamp("s")), "val: timestamp"),
    (pa.duration("ms"), pa.array([-5, -(2**63)], pa.int64()).cast(pa.duration("ms")), "val: duration"),
    (Stay, stays(), "val: field 'nights': in a list: date32"),
]


@pytest.mark.parametrize(("kind", "vals", "fault"), VALS, ids=lambda given: str(given)[:20])
@pytest.mark.parametrize("chunked", [False, True])
async def test_vals_that_python_has_not(
    client: ap.Client, kind: Any, vals: pa.Array, fault: str, chunked: bool
) -> None:
    """The row at fault is named, and nothing is put: the feed goes on."""
    table = client.table("t", int, kind)
    given = pa.table({"key": [1, 2], "val": vals})
    some: Any = iter([given.slice(0, 1), given.slice(1)]) if chunked else given
    with pytest.raises(ap.InvalidUpdate, match=fault) as error:
        await table.put_many(some)
    assert error.value.row == 1

    async def body(tx: ap.Transaction) -> None:
        tx.put_many(table, given)

    with pytest.raises(ap.InvalidUpdate, match=fault):
        await client.transact(body)
    assert await table.count() == 0

    await table.put_many(given.slice(0, 1))
    async with table.subscription("sub") as sub:
        step = await anext(sub)
        assert [change.key for change in step.changes] == [1]


async def test_keys_that_python_has_not(client: ap.Client) -> None:
    table = client.table("t", dt.datetime, int)
    with pytest.raises(ap.InvalidUpdate, match="key: timestamp") as error:
        await table.put_many(pa.table({"key": far(MOMENT), "val": [1, 2]}))
    assert error.value.row == 1
    assert await table.count() == 0
