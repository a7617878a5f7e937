"""Goal: a client that recorded ids last does not look whether others came since, and is right."""

import uuid

import pytest

import aiopersist as ap
from tests.table.kit import table
from tests.table.test_calls_counted import ids


class OutOfStock(Exception):
    pass


@pytest.mark.parametrize("how", ["raises", "writes", "conflicts"])
async def test_a_repeat_of_another_clients_transaction_is_told(how: str) -> None:
    url, (first, second) = f"mem://{uuid.uuid4().hex}", ids(2)
    async with ap.open(url) as one, ap.open(url) as other:
        stocks = {client: table(client, "stock") for client in (one, other)}
        await stocks[one].put("tea", 1)

        async def take(tx: ap.Transaction, client: ap.Client) -> None:
            left = await tx.get(stocks[client], "tea") or 0
            if not left and how == "raises":
                raise OutOfStock
            if not left and how == "conflicts":
                await stocks[other].put("tea", 0)  # no attempt fits
                await stocks[other].put("tea", 5)
            tx.put(stocks[client], "tea", left - 1)

        async def nothing(tx: ap.Transaction) -> None:
            """It records its id."""

        await one.transact(nothing, once=first)
        await other.transact(lambda tx: take(tx, other), once=second)
        time = await other.happened(second)
        assert await one.transact(lambda tx: take(tx, one), once=second, max_attempts=1) == ap.Repeated(time)
        assert await one.transact(lambda tx: take(tx, one), once=second) == ap.Repeated(time)
        assert await stocks[one].get("tea") == (5 if how == "conflicts" else 0)
        with pytest.raises(OutOfStock) if how == "raises" else pytest.raises(LookupError):
            await one.transact(lambda tx: _fails(tx, take, one, how))


async def _fails(tx: ap.Transaction, take: object, client: ap.Client, how: str) -> None:
    raise OutOfStock if how == "raises" else LookupError
