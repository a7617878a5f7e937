"""Goal: a publisher that is killed at any write leaves the old table or the new one, never a broken one, and
what it leaves behind goes with the next publications."""

import re
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.storage.urls import open_blob, open_consensus
from tests.iceberg.kit import (
    SETTINGS,
    Life,
    MortalBlob,
    MortalConsensus,
    Rows,
    assert_shows,
    by_pyiceberg,
    contents,
    own_files,
)

SCHEMA: Any = ap.Schema(str, int)
WRITES_MAX = 40


async def _append(client: ap.Client, time: int) -> Rows:
    rows = [(f"k{time}", time, time, 1), ("twice", time, time, 2)]
    if time:
        rows.append((f"k{time - 1}", time - 1, time, -1))
    async with client.writer("t", SCHEMA) as writer:
        await writer.compare_and_append(rows, time, time + 1)
    return await contents(client)


def _versions(folder: Path) -> list[str]:
    """The metadata files, the oldest first."""
    metadata = folder / "blob/iceberg/t/metadata"
    numbers = sorted(
        int(m[1]) for path in metadata.glob("v*.json") if (m := re.search(r"v(\d+)\.", path.name))
    )
    return [f"file://{metadata}/v{number}.metadata.json" for number in numbers]


async def _publish_and_die(folder: Path, calls: int, *, after: bool) -> bool:
    """Whether the publisher survived."""
    life = Life(calls, after=after)
    blob = MortalBlob(open_blob(f"file://{folder}/blob"), life)
    consensus = MortalConsensus(open_consensus(f"sqlite://{folder}/state.db"), life)
    survived = False
    with suppress(ap.Error):
        async with ap.open(blob=blob, consensus=consensus, settings=SETTINGS, maintenance=False) as client:
            await client.publish("t", keep=2)
            survived = True
    with suppress(ap.Error):
        await blob.inner.aclose()
    await consensus.inner.aclose()
    return survived


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_killed_at_each_write(tmp_path: Path, after: bool) -> None:
    for calls in count(1):
        assert calls < WRITES_MAX
        folder = tmp_path / str(calls)
        async with ap.open(folder, settings=SETTINGS, maintenance=False) as client:
            for time in range(3):
                old = await _append(client, time)
                await client.publish("t", keep=2)
            new = await _append(client, 3)
        survived = await _publish_and_die(folder, calls, after=after)
        *_, newest = _versions(folder)
        shown = by_pyiceberg(newest)
        assert shown in (old, new)
        assert by_pyiceberg(f"file://{folder}/blob/iceberg/t") in (old, shown)  # by the hint
        await _check_recovery(folder, new)
        if survived:
            break
    assert calls > 8


async def _check_recovery(folder: Path, expected: Rows) -> None:
    """The next publications show everything, and leave only what their last versions need."""
    async with ap.open(folder, settings=SETTINGS, maintenance=False) as client:
        published = await client.publish("t", keep=2)
        assert_shows(published.metadata, expected)
        for time in range(4, 7):
            expected = await _append(client, time)
            published = await client.publish("t", keep=2)
        assert_shows(published.metadata, expected)
        files = own_files(folder)
        assert len(_versions(folder)) == 2
        ids = {match[1] for name in files if (match := re.search(r"/\d+-(\d+)-", name))}
        assert len(ids) == 2
        assert len(await client.tags("t")) == 2
