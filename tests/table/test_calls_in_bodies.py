"""Goal: a change that a body of a transaction makes in another way than by its transaction stays though the
body raises, so the log warns of it, with the place of the call; of what is meant to be apart it does not."""

import asyncio
import logging
from typing import Any

import pytest

import aiopersist as ap
from tests.table.kit import table


class Declined(Exception):
    pass


async def _put(tx: ap.Transaction, t: Any) -> None:
    tx.put(t, "k", 1)


CHANGES: dict[str, Any] = {
    "put": lambda c, t, w: t.put("k", 1),
    "put_many": lambda c, t, w: t.put_many({"k": 1}),
    "insert": lambda c, t, w: t.insert("k", 1),
    "update": lambda c, t, w: t.update("k", lambda old: 1),
    "delete": lambda c, t, w: t.delete("gone"),
    "write": lambda c, t, w: w.write([("k", 1)]),
    "transact": lambda c, t, w: c.transact(lambda tx: _put(tx, t)),
}


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [found for found in caplog.records if "in the body of a transaction" in found.getMessage()]


@pytest.mark.parametrize("change", CHANGES)
async def test_a_change_beside_its_transaction_is_warned_of(
    change: str, quiet_mem: ap.Client, caplog: pytest.LogCaptureFixture
) -> None:
    t = table(quiet_mem)
    await t.put("gone", 1)
    async with quiet_mem.writer("journal", ap.Schema(str, int), clock="wall") as writer:

        async def body(tx: ap.Transaction) -> None:
            await CHANGES[change](quiet_mem, t, writer)
            await CHANGES[change](quiet_mem, t, writer)
            raise Declined

        with pytest.raises(Declined if change != "insert" else ap.KeyExists):
            await quiet_mem.transact(body)
    (warning,) = warnings_in(caplog)
    assert f".{change} in the body" in warning.getMessage()
    assert "it stays if the body raises" in warning.getMessage()
    assert warning.pathname == __file__
    if change not in ("delete", "write"):
        assert await t.get("k") == 1, "it stays: the warning is true"


async def test_what_is_apart_is_not_warned_of(quiet_mem: ap.Client, caplog: pytest.LogCaptureFixture) -> None:
    """Goal: changes by the transaction, reads, another client, another task, what comes before and after."""
    t, keys = table(quiet_mem), ["by tx", "by a task", "beside", "after"]
    async with ap.open("mem://") as client:
        other = table(client)

        async def body(tx: ap.Transaction) -> None:
            assert await t.get("before") == 1
            tx.put(t, "by tx", 1)
            await asyncio.create_task(t.put("by a task", 1))
            await other.put("by another client", 1)

        await t.put("before", 1)
        await asyncio.gather(quiet_mem.transact(body), t.put("beside", 1))
        await t.put("after", 1)
    assert await t.get_many(keys) == dict.fromkeys(keys, 1)
    assert warnings_in(caplog) == []
