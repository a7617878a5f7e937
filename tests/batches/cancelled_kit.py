"""Helpers that the tests of cancelled appends of batches share."""

import aiopersist as ap


async def rewritten(batch: ap.Batch, time: int) -> ap.Batch:
    batch.rewrite_ts(time, time + 1)
    return batch
