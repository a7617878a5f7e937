"""Goal: a consumer that is killed at any moment goes on, as another process, where it was: outputs that share
its commit are there once, and every update is seen."""

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from tests.conftest import StoreUrls
from tests.support.schemas import SCHEMA

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)
WRITTEN = 20  # updates in each turn: its process writes at least one line about each


async def lines_until(process: Any, count: int) -> list[str]:
    """So many of its lines, or all until it is killed."""
    found: list[str] = []
    async with asyncio.timeout(50):
        while len(found) < count and (line := await process.stdout.readline()):
            found.append(line.decode().strip())
    return found


async def settled(client: ap.Client, upper: ap.Antichain) -> None:
    async with asyncio.timeout(50):
        while any(view.position < upper for view in (await client.admin.subscriptions("s")).values()):
            await asyncio.sleep(0.02)


async def play(location: StoreUrls, kills: int, seed: int) -> None:
    dice = random.Random(seed)
    seen: list[str] = []
    written = 0
    async with ap.open(blob=location.blob, consensus=location.consensus) as client:
        async with client.writer("s", SCHEMA) as writer:
            for turn in range(kills + 1):
                command = [sys.executable, "-m", "tests.subscription.consumer_process", *location, str(turn)]
                pipe = asyncio.subprocess.PIPE
                process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe)
                for _ in range(WRITTEN):
                    await writer.write([(f"k{written}", written)])
                    written += 1
                    await asyncio.sleep(dice.uniform(0, 0.01))
                if turn < kills:
                    seen += await lines_until(process, dice.randint(1, WRITTEN))
                else:
                    seen += await lines_until(process, 1)
                    await settled(client, writer.upper)
                process.kill()
                seen += await lines_until(process, 10**6)
                await process.wait()
        async with client.reader("out", SCHEMA) as reader, reader.snapshot() as snapshot:
            rows = await snapshot.rows()
        assert sorted(rows) == sorted((f"k{number}", 2 * number, 1) for number in range(written))
        assert await client.table("sums", str, int).get("all") == sum(range(written))
    assert {line for line in seen if line.startswith("seen ")} >= {f"seen {n}" for n in range(written)}


@pytest.fixture
def on_disk(tmp_path: Path) -> StoreUrls:
    return StoreUrls(f"file://{tmp_path / 'blob'}", f"sqlite://{tmp_path / 'state.db'}")


async def test_a_consumer_that_is_killed(on_disk: StoreUrls) -> None:
    await play(on_disk, 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("blob", ["s3", pytest.param("files", marks=pytest.mark.long)])
async def test_on_postgres(blob: str, tmp_path: Path, postgres_url: str, best_s3_url: str) -> None:
    url = best_s3_url if blob == "s3" else f"file://{tmp_path / 'blob'}"
    await play(StoreUrls(url, postgres_url), 2, 1)
