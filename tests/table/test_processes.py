"""Goal: four processes on one location, of which some are killed, with networks that lose what they carry,
are told what one copy of the tables would tell, in one order; nothing acknowledged is lost, nothing is done
twice, no transaction is there by half, no call waits without end (`processes.py`).

A failure names its seed: `python -m tests.replay processes SEED`. What processes do at once differs from run
to run."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import S3_LABELS
from tests.table.moves import RATES
from tests.table.processes import play, stores_at

LONG_GAMES = int(os.environ.get("AIOPERSIST_TEST_TABLE_PROCESSES", "10"))
STORES = [
    pytest.param("files+sqlite", marks=pytest.mark.long),
    pytest.param("files+postgres", marks=pytest.mark.long),
    "s3+postgres",
]


@pytest.fixture(params=STORES)
def servers(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "postgres" in request.param:
        found["postgres"] = request.getfixturevalue("postgres_server")
    if "s3" in request.param:
        found["s3"] = request.getfixturevalue("_s3_pool")[S3_LABELS[0]]
    return found


async def test_a_short_game(tmp_path: Path) -> None:
    async with stores_at(tmp_path, "") as stores:
        counts = await play(1, tmp_path, stores, kills=2, tasks=4, moves=5, cuts=12)
    assert counts["transfer"] and counts["transact"] and counts["update"], counts


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_games(servers: dict[str, Any], tmp_path: Path, postgres_schema: str) -> None:
    async with stores_at(tmp_path, postgres_schema, **servers) as stores:
        counts = await play(7, tmp_path, stores, kills=3, moves=16, cuts=30)
    assert not [kind for kind in RATES if not counts[kind]], counts


@pytest.mark.long
@pytest.mark.timeout(0)
@pytest.mark.parametrize("seed", range(100, 100 + LONG_GAMES))
async def test_long_games(seed: int, servers: dict[str, Any], tmp_path: Path, postgres_schema: str) -> None:
    """`AIOPERSIST_TEST_TABLE_PROCESSES` says how many. All tables are read at each commit time."""
    async with stores_at(tmp_path, postgres_schema, **servers) as stores:
        await play(seed, tmp_path, stores, kills=6, moves=60)
