"""Goal: calls that share a request, a commit or an opening get errors of their own: a note that one of them
adds to its error is not in those of the others."""

import asyncio
import pickle
from collections.abc import Callable
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.testing.faults import Outcome
from tests.conftest import StoreUrls
from tests.support.schemas import SCHEMA
from tests.table.kit import gated

CALLS = 5


@pytest.mark.parametrize("what", ["put", "get", "write", "open", "transact", "reader", "indexed"])
async def test_each_call_has_an_error_of_its_own(elsewhere: StoreUrls, what: str) -> None:
    async with gated(elsewhere, retry_timeout_s=0.0) as (client, gate):
        table, unopened = client.table("t", str, int), client.table("u", str, int)
        await table.put("a", 1)
        writer = await client.writer("s", SCHEMA)
        reader = await client.reader("s", SCHEMA)
        indexed = await client.indexed("ix", background=False)
        stream = await indexed.register("x", str, int)

        async def body(tx: ap.Transaction) -> None:
            tx.put(table, "z", 1)

        ways: dict[str, Callable[[int], Any]] = {
            "put": lambda n: table.put(f"k{n}", n),
            "get": lambda n: table.get(f"k{n}"),
            "write": lambda n: writer.write([("a", n)]),
            "open": lambda n: unopened.get("a"),
            "transact": lambda n: client.transact(body),
            "reader": lambda n: reader.fetch_recent_upper(),
            "indexed": lambda n: indexed.write([(stream, [("a", n, 0, 1)])]),
        }
        gate.rates = {Outcome.REFUSED: 1.0}
        found: list[Any] = await asyncio.gather(*map(ways[what], range(CALLS)), return_exceptions=True)
        gate.heal()
        assert all(isinstance(error, ap.Error) for error in found)
        assert len({id(error) for error in found}) == CALLS
        for number, error in enumerate(found):
            error.add_note(f"note {number}")
        for number, error in enumerate(found):
            assert error.__notes__ == [f"note {number}"]
            assert str(pickle.loads(pickle.dumps(error))) == str(error) == str(found[0])
