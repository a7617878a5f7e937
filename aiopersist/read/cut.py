"""Cuts batches of contents into smaller ones, for steps of bounded size."""

from collections import deque

from aiopersist.data.lazy import pa
from aiopersist.read.puller import Items


def batches_in(rows: "pa.RecordBatch | pa.Table") -> "list[pa.RecordBatch]":
    """The record batches of `rows`."""
    return [rows] if isinstance(rows, pa.RecordBatch) else rows.to_batches()


class CutBatches:
    """The batches, each of at most about `bytes_max`."""

    def __init__(self, batches: "Items[pa.RecordBatch]", bytes_max: int) -> None:
        self._batches = batches
        self._bytes_max = bytes_max
        self._rest: deque[pa.RecordBatch] = deque()
        """Of a larger batch."""

    async def next(self) -> "pa.RecordBatch | None":
        """The next batch; `None` after the last one."""
        if not self._rest:
            batch = await anext(self._batches, None)
            if batch is None or batch.nbytes <= self._bytes_max:
                return batch
            rows = max(batch.num_rows * self._bytes_max // batch.nbytes, 1)
            self._rest.extend(batch.slice(at, rows) for at in range(0, batch.num_rows, rows))
        return self._rest.popleft()

    async def aclose(self) -> None:
        """Stop reading."""
        self._rest.clear()
        await self._batches.aclose()
