"""Transactions, uppers; see `test_appends.py`."""

import asyncio
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard.commit import commit
from tests.conftest import StoreUrls
from tests.support.schemas import KIND, SCHEMA
from tests.support.shards import f, open_at, rows, shard_of
from tests.write.appends_kit import left_behind

# --- transactions -------------------------------------------------------------------------------------


async def test_a_transaction_happens_once(location: StoreUrls) -> None:
    """Goal: any repetition writes nothing: by the same handle, another, another client, at the same moment,
    later."""
    async with (
        open_at(location) as one,
        open_at(location) as two,
        one.writer("t", SCHEMA) as w,
        one.writer("t", SCHEMA) as same,
        two.writer("t", SCHEMA) as other,
    ):
        assert await one.txn_number("t", "app") is None
        await w.compare_and_append([("a", 1, 0, 1)], 0, 1, txn=("app", 5))
        before = await left_behind(one)
        for again in (w, same, other):
            await again.compare_and_append([("a", 1, 0, 1)], 0, 1, txn=("app", 5))
            await again.compare_and_append([("a", 1, 7, 1)], 7, 8, txn=("app", 5))  # whatever the upper
            await again.compare_and_append([("a", 1, 1, 1)], 1, 2, txn=("app", 4))  # older
            assert await again.write([("a", 1)], txn=("app", 5)) == 0
        assert await left_behind(one) == before
        times = await asyncio.gather(*(h.write([("b", 1)], txn=("app", 6)) for h in (w, w, same, other)))
        assert await rows(one) == [("a", 1, 1), ("b", 1, 1)]
        assert min(times) == 1
        await other.compare_and_append([("c", 1, 9, 1)], other.upper, 10, txn=("second", 0))
        assert await one.txn_number("t", "app") == 6
        assert await two.txn_number("t", "second") == 0
        assert await rows(two) == [("a", 1, 1), ("b", 1, 1), ("c", 1, 1)]


async def test_transactions_that_wait_together(mem: ap.Client) -> None:
    """Goal: of one application each number goes once, in any order; others share the commit."""
    async with mem.writer("t", SCHEMA) as w:
        calls = [w.write([(f"n{number}", 0)], txn=("app", number)) for number in (1, 2, 2, 1, 3)]
        calls += [w.write([("x", 0)], txn=("other", 9)), w.write([("plain", 0)])]
        await asyncio.gather(*calls)
        assert await mem.txn_number("t", "app") == 3
        assert await rows(mem) == [(k, 0, 1) for k in ("n1", "n2", "n3", "plain", "x")]


@pytest.mark.parametrize(
    "txn",
    [
        ("app",),
        ("app", 1, 2),
        ["app", 1],
        ("", 1),
        (b"app", 1),
        ("app", "1"),
        ("app", 1.0),
        ("app", True),
        ("app", -1),
        ("app", 2**63),
        ("app", None),
        (None, 1),
        ("a\ud800", 1),
        "app",
        7,
    ],
    ids=repr,
)
async def test_the_form_of_a_transaction(mem: ap.Client, txn: Any) -> None:
    async with mem.writer("t", SCHEMA) as w:
        for call in (lambda: w.compare_and_append([], 0, 1, txn=txn), lambda: w.write([("a", 1)], txn=txn)):
            with pytest.raises(ap.InvalidUsage) as caught:
                await call()
            assert caught.value.kind is KIND.INVALID_TXN
        assert w.upper == f(0)


@pytest.mark.parametrize("app", ["a", 'ä\n\0"', "x" * 5000, "__proto__", "1"])
async def test_any_text_is_an_application(client: ap.Client, app: str) -> None:
    async with client.writer("t", SCHEMA) as w:
        await w.write([("a", 1)], txn=(app, 2**63 - 1))
        await w.write([("a", 1)], txn=(app, 0))
        assert await client.txn_number("t", app) == 2**63 - 1
        assert await rows(client) == [("a", 1, 1)]


# --- uppers -------------------------------------------------------------------------------------------


async def test_waiting_for_the_upper(location: StoreUrls) -> None:
    """Goal: strictly past; woken by another client without polling."""
    async with (
        open_at(location) as one,
        open_at(location, watch_timeout_s=60) as two,
        one.writer("t", SCHEMA) as w,
        two.writer("t", SCHEMA) as other,
    ):
        await w.compare_and_append([], 0, 5)
        async with asyncio.timeout(50):
            await other.wait_for_upper_past(4)
        waiting = asyncio.create_task(other.wait_for_upper_past(f(5)))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await w.compare_and_append([], 5, 6)
        async with asyncio.timeout(50):
            await waiting
        assert other.upper == f(6)
        with pytest.raises(ap.InvalidUsage):
            await other.wait_for_upper_past((1, 2))


async def test_a_writer_whose_lease_ran_out_registers_anew(mem: ap.Client) -> None:
    """Goal: found out in the middle of an append by a state that it did not know."""
    from aiopersist.shard.attempt import Slot
    from aiopersist.state.writing import ExpireWriter

    async with (
        ap.open("mem://lease-ran-out") as one,
        ap.open("mem://lease-ran-out") as two,
        one.writer("t", SCHEMA) as w,
        two.writer("t", SCHEMA),
    ):
        for number, append in enumerate(
            (
                lambda: w.compare_and_append([("a", 1, 0, 1)], 0, 1),
                lambda: w.append([("a", 1, 1, 1)], 1, 2),
                lambda: w.write([("a", 1)]),
            )
        ):
            before = w.writer_id
            await commit(shard_of(two).register, ExpireWriter(before), Slot())
            await append()
            assert w.writer_id != before
            assert await rows(two) == [("a", 1, number + 1)]
            assert await w.settle() is None
