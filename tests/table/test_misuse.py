"""Goal: a newcomer who misuses a table gets an error that says what to write, and nothing is written."""

from collections.abc import Callable
from datetime import date
from typing import Any

import pytest

import aiopersist as ap
from tests.table.kit import entries


async def a_coroutine_function(tx: Any) -> None:
    tx.put("stock", "a", 2)


def a_plain_function(tx: Any) -> int:
    return 2


CASES: dict[str, tuple[Callable[[Any, Any], Any], type[Exception], str]] = {
    "one key, get_many": (lambda c, t: t.get_many("abc"), TypeError, "'abc' is one key: give a list"),
    "one key, changes": (lambda c, t: anext(t.changes(keys="abc")), TypeError, "is one key: give a list"),
    "keys without vals": (lambda c, t: t.put_many(["ab"]), ap.InvalidUpdate, "is no tuple of"),
    "a list to delete": (
        lambda c, t: t.delete(["a"]),
        ap.InvalidUpdate,
        r"expected str, got list \['a'\]",
    ),
    "another key": (lambda c, t: t.get(7), ap.InvalidUpdate, "key: expected str, got int 7"),
    "another val": (lambda c, t: t.put("a", "x"), ap.InvalidUpdate, "val: expected int, got str 'x'"),
    "no val": (lambda c, t: t.put("a", None), ap.InvalidUpdate, "val: expected int, got None"),
    "a flag": (lambda c, t: t.put("a", True), ap.InvalidUpdate, "val: expected int, got bool True"),
    "too large a val": (lambda c, t: t.put("a", 2**70), ap.InvalidUpdate, f"{2**70} does not fit int64"),
    "time as text": (lambda c, t: t.get("a", as_of="today"), ap.InvalidUsage, "give an aware datetime"),
    "time as a day": (lambda c, t: t.get("a", as_of=date.min), ap.InvalidUsage, "give an aware datetime"),
    "seconds": (lambda c, t: t.get("a", as_of=1.5), ap.InvalidUsage, "microseconds since 1970"),
    "async update": (
        lambda c, t: t.update("a", a_coroutine_function),
        TypeError,
        "a plain function is needed",
    ),
    "plain body": (lambda c, t: c.transact(a_plain_function), TypeError, "is no coroutine function"),
    "no body": (lambda c, t: c.transact(None), TypeError, "None is no coroutine function"),
    "a name for a table": (
        lambda c, t: c.transact(a_coroutine_function),
        TypeError,
        "'stock' is not an aiopersist",
    ),
}


@pytest.mark.parametrize("case", CASES)
async def test_it_says_what_to_write(case: str, quiet_mem: ap.Client) -> None:
    call, error, text = CASES[case]
    table = quiet_mem.table("stock", str, int)
    await table.put("a", 1)
    upper = await quiet_mem.upper("stock")
    with pytest.raises(error, match=text):
        await call(quiet_mem, table)
    assert await entries(table) == [("a", 1)]
    assert await quiet_mem.upper("stock") == upper


async def test_a_transaction_refuses_one_text_for_keys(quiet_mem: ap.Client) -> None:
    table = quiet_mem.table("stock", str, int)

    async def body(tx: ap.Transaction) -> None:
        await tx.get_many(table, "abc")

    with pytest.raises(TypeError, match="is one key"):
        await quiet_mem.transact(body)
