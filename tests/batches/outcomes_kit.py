"""Helpers that the tests of outcomes of batches share."""

import asyncio
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiopersist as ap
from aiopersist.testing.faults import Faults, Outcome
from tests.support import rigs
from tests.support.rigs import Rig
from tests.support.schemas import ROWS, Writer
from tests.support.shards import CAS

PENDING, CONSUMED = ap.UsageKind.OUTCOME_PENDING, ap.UsageKind.CONSUMED


def rig(**limits: Any) -> AbstractAsyncContextManager[Rig]:
    """The faults of blobs are apart from those of versions."""
    return rigs.rig(blob_faults=Faults(), **limits)


async def doubtful(r: Rig, w: Writer, work: Awaitable[Any], outcome: Outcome) -> None:
    """Make that append end without an answer, its statement having ended so."""
    await w.fetch_recent_upper()
    r.faults.fail_next(CAS, outcome)
    r.faults.fail_next("scan", Outcome.DROPPED, 10**6)
    scans = r.faults.calls["scan"]
    task = asyncio.ensure_future(work)
    while r.faults.calls["scan"] == scans:
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def by_compare(r: Rig, w: Writer, batch: ap.Batch) -> None:
    await w.compare_and_append_batch([batch], 0, 1)


async def by_replica(r: Rig, w: Writer, batch: ap.Batch) -> None:
    await w.append_batch(batch, 0, 1)


async def staged(r: Rig, *, shared: bool = False) -> tuple[Writer, ap.Batch]:
    w = await r.writer()
    batch = await w.batch(ROWS, 0, 1)
    if shared:
        batch = await w.batch_from_transmittable(batch.to_transmittable())
    r.kept.append(batch)
    return w, batch
