"""The batch builder: makes a batch of any size, update by update, in bounded memory."""

import asyncio
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from aiopersist.base.errors import InvalidUpdate, InvalidUsage, UsageKind
from aiopersist.base.frontier import Antichain, Time
from aiopersist.base.resource import Resource, Scope
from aiopersist.data.updates.inputs import own_copy
from aiopersist.shard.registration import Registration
from aiopersist.write.batch import Batch
from aiopersist.write.checks import check_bounds
from aiopersist.write.staged import StagedBatch, StagingContext


class Added(StrEnum):
    """The outcome of adding an update."""

    RECORD = "RECORD"
    """It is buffered."""
    RECORD_AND_PARTS = "RECORD_AND_PARTS"
    """It is added, and the full buffer became one or more parts."""


class BatchBuilder(Resource):
    """Takes updates, uploads parts in the background, and makes one `Batch` of them.

    Serves many tasks; their calls take turns. Memory does not grow with the batch: about
    `settings.batch_builder_max_outstanding_parts` + 2 times `settings.blob_target_size`, and what allocators
    keep. A builder that fails, or closes without `finish`, deletes its parts.
    """

    def __init__(
        self, context: StagingContext, scope: Scope, registration: Registration, lower: Antichain
    ) -> None:
        self._context = context
        self._trace: Mapping[str, str] = {}  # of the process that lent the writer
        self._registration = registration  # `_close` releases it
        self._upload = context.upload(lower, registration)
        self._turn = asyncio.Lock()
        self._finished = False
        self._deletion: asyncio.Task[None] | None = None
        self._scope = Scope("the builder", scope, context.shard.id)
        self._scope.on_close = self._close

    @property
    def lower(self) -> Antichain:
        return self._upload.lower

    @property
    def parts_in_flight(self) -> int:
        """Parts that are being encoded or uploaded, or wait to be collected."""
        return self._upload.parts_in_flight

    @property
    def parts_finished(self) -> int:
        """Parts that were collected."""
        return self._upload.parts_finished

    @property
    def write_stalls(self) -> int:
        """How often an update has waited for the oldest part in flight."""
        return self._upload.write_stalls

    async def add(self, key: Any, val: Any, time: Time, diff: int) -> Added:
        """Add one update. Waits while too many parts are in flight. `InvalidUpdate` and
        `UPDATE_NOT_BEYOND_LOWER` change nothing; the error of an upload closes the builder. A call that is
        cancelled while it waits may or may not have added the update."""
        self._check_not_finished()
        with self._scope.call():
            async with self._turn:
                before = self._parts
                try:
                    self._upload.check_parts()
                    if self._upload.take_row((key, val, time, diff)):
                        await self._upload.start_full()
                    else:
                        await self._upload.take([(key, val, time, diff)])
                except (InvalidUpdate, InvalidUsage, asyncio.CancelledError):
                    raise
                except BaseException:
                    await self.aclose()
                    raise
                return Added.RECORD if self._parts == before else Added.RECORD_AND_PARTS

    async def extend(self, updates: Any) -> None:
        """Add rows, Arrow data, or an iterator or async iterator of either. An error before the first row was
        added changes nothing. A later error or cancellation closes the builder, since a part of the input
        must not pass for all of it."""
        self._check_not_finished()
        with self._scope.call():
            updates = own_copy(updates)
            async with self._turn:
                before = self._upload.rows_taken
                try:
                    self._upload.check_parts()
                    await self._upload.take(updates)
                except BaseException as error:
                    refused = isinstance(error, InvalidUpdate | InvalidUsage | asyncio.CancelledError)
                    if not refused or self._upload.rows_taken != before:
                        await self.aclose()
                    raise

    async def finish(self, upper: Antichain | Time) -> Batch:
        """The batch, once all parts are uploaded. `INVALID_BOUNDS` unless `lower <= upper`,
        `UPDATE_BEYOND_UPPER` if an added time is at or beyond `upper`. Any error closes the builder."""
        self._check_not_finished()
        shard = self._context.shard
        with shard.stack.tracing.span("batch", shard.known_as, self._trace), self._scope.call():
            async with self._turn:
                self._check_not_finished()
                try:
                    _, end = check_bounds(self.lower, upper, self._context.schema)
                    self._upload.check_upper(end)
                    hollow = await self._upload.finish(end)
                except BaseException:
                    await self.aclose()
                    raise
                batch = Batch(StagedBatch(self._context, self._registration, hollow))
                self._finished = True
                self._scope.close()
                return batch

    async def aclose(self) -> None:
        """Close the builder; delete its parts unless it is finished. The deletion continues in the background
        if the caller is cancelled or uploads take long. Idempotent."""
        self._scope.close()
        deletion, task = self._deletion, asyncio.current_task()
        if deletion is not None and not deletion.done() and not (task and task.cancelling()):
            await self._context.shard.stack.supervisor.released(deletion)

    @property
    def _parts(self) -> int:
        return self._upload.parts_in_flight + self._upload.parts_finished

    def _close(self) -> None:
        if not self._finished:
            self._deletion = self._upload.discard()
        self._registration.release()

    def _check_not_finished(self) -> None:
        if self._finished:
            shard_id = self._context.shard.id
            raise InvalidUsage(UsageKind.CONSUMED, "the builder is finished", shard_id=shard_id)

    def __repr__(self) -> str:
        counts = f"{self.parts_finished} parts finished, {self.parts_in_flight} in flight"
        return f"<BatchBuilder from {self.lower} of {self._context.shard.id}: {counts}>"
