"""Goal: a statement whose answer does not come fails, and no other one does."""

import asyncio
import random
from typing import Any

import pytest

from aiopersist.base.errors import Indeterminate
from aiopersist.storage.postgres import pool
from aiopersist.storage.postgres.consensus import PostgresConsensus
from aiopersist.testing.simulation.loop import SimulatedLoop
from tests.storage.postgres_kit import consensus  # noqa: F401  # a fixture


class Silent:
    """A connection whose answer does not come."""

    def __init__(self) -> None:
        self.ended_at: float | None = None

    def terminate(self) -> None:
        self.ended_at = self.ended_at or asyncio.get_running_loop().time()


def test_each_has_its_own_time() -> None:
    loop = SimulatedLoop(random.Random(0))
    limit_s = pool.STATEMENT_TIMEOUT_S

    async def scenario() -> None:
        dog, one, two, quick, later = pool._Watchdog(), *(Silent() for _ in range(4))
        connections: Any = one, two, quick, later
        with dog.watching(connections[0]):
            await asyncio.sleep(limit_s / 2)
            with dog.watching(connections[2]):
                await asyncio.sleep(1)
            with dog.watching(connections[1]):
                await asyncio.sleep(2 * limit_s)
        assert one.ended_at == pytest.approx(limit_s, abs=0.1)
        assert two.ended_at == pytest.approx(1.5 * limit_s + 1, abs=0.1)
        assert quick.ended_at is None
        assert dog._timer is None and not dog._deadlines
        began = loop.time()
        with dog.watching(connections[3]):
            await asyncio.sleep(2 * limit_s)
        assert later.ended_at == pytest.approx(began + limit_s, abs=0.1)
        with dog.watching(connections[2]):
            dog.close()
            await asyncio.sleep(2 * limit_s)
        assert quick.ended_at is None

    try:
        loop.run_until_complete(scenario())
    finally:
        loop.close()


async def test_a_statement_that_hangs_is_of_unknown_outcome(
    consensus: PostgresConsensus,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await consensus.compare_and_set("k", None, b"0")
    consensus._pool._watchdog.close()  # which would look again only when that one's time is over
    with monkeypatch.context() as patch, pytest.raises(Indeterminate, match="lost the answer"):
        patch.setattr(pool, "STATEMENT_TIMEOUT_S", 1.0)
        await consensus._pool.write(lambda connection: connection.execute("SELECT pg_sleep(1000)"))
    ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query = 'SELECT pg_sleep(1000)'"
    assert await consensus._pool.write(lambda connection: connection.fetchval(ended))
    assert await consensus.compare_and_set("k", 0, b"1")
