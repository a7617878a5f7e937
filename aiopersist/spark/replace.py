"""The retractions of an upsert, an overwrite or a deletion: of the contents, then of later changes by others.

1. The contents as of an upper are read once, and tasks retract the replaced rows (`tasks.retract`).
2. If another writer was first, the changes since that upper are read and retracted in the same way: added
   rows are retracted, and retractions of removed rows are undone. So all retractions together equal those of
   the contents as of the newer upper, and another attempt costs only the changes.
3. If that history is gone, or after `ROUNDS` rounds, everything starts again.
"""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Self, TypeAlias

from aiopersist.base.errors import SinceViolation, UpperMismatch
from aiopersist.base.frontier import Antichain, int_time
from aiopersist.base.portal import closing, on_caller, to_its_end
from aiopersist.client.client import Client
from aiopersist.data.types.schema import Schema
from aiopersist.read.shared_read import SharedRead
from aiopersist.spark import tasks
from aiopersist.spark.location import SparkLocation
from aiopersist.spark.plan import DELETE, OVERWRITE, WritePlan, Writer, writer_of
from aiopersist.spark.tasks import Retraction, StagedTask, TaskRefused, accepted
from aiopersist.write.batch import Batch, discard_all
from aiopersist.write.transmit import decode

Results: TypeAlias = Sequence[StagedTask | TaskRefused]
Run = Callable[[Callable[..., StagedTask], Sequence[tuple[Any, ...]]], Results]
"""Runs a task for each tuple of arguments, and blocks until all are done."""

ROUNDS = 100  # each adds a batch per task


class Replacement:
    """See the header. Use it in `async with`: at the end it deletes retractions that were not appended."""

    def __init__(
        self,
        client: Client,
        location: SparkLocation,
        plan: WritePlan,
        run: Run,
        tasks_: int,
        writer: Writer,
        staged: Sequence[StagedTask],
    ) -> None:
        self.batches: list[Batch] = []
        """They retract rows of the contents as of the upper that `catch_up` returned."""
        self._client = client
        self._location = location
        self._plan = plan
        self._run = run
        self._tasks = tasks_
        self._writer = writer
        self._staged = staged
        self._upper: int | None = None
        """The upper up to which they retract; `None` at first."""
        self._rounds = 0
        self._writers = AsyncExitStack()
        """The writers of the retractions, open until the append, since a closed writer's batch expires."""
        self._grant: tuple[Schema[Any, Any, Any], bytes] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await to_its_end(self._drop)

    async def catch_up(self) -> int:
        """Retract the contents at the upper. Returns the upper."""
        if self._upper is not None and self._rounds < ROUNDS:
            upper = await upper_of(self._writer)
            with suppress(SinceViolation):
                read = await self._client.workers.shared_read(self._plan.shard, start=self._upper, end=upper)
                await self._retract(read)
                self._upper = upper
                return upper
        await self._drop()
        upper, whole = await self._whole()
        if whole is not None:
            await self._retract(whole)
        self._upper = upper
        return upper

    async def _whole(self) -> tuple[int, SharedRead | None]:
        """The upper, and a read of the rows to retract; `None` if there are none. Upserts and writes of
        tables always read: their tasks also look for duplicate keys in the new rows."""
        while True:
            upper = await upper_of(self._writer)
            if not upper and self._plan.spec.mode == OVERWRITE and not self._plan.table:
                return upper, None
            try:
                if not upper:
                    return upper, await self._client.workers.shared_read(self._plan.shard, start=0, end=0)
                return upper, await self._client.workers.shared_read(self._plan.shard, upper - 1)
            except SinceViolation as error:
                await _move_upper(self._writer, upper, error.since)

    async def _retract(self, read: SharedRead) -> None:
        """Retract the replaced rows of a read."""
        try:
            grant = await self._grant_for(read.schema)
            jobs = [(self._location, grant, piece) for piece in await self._pieces(read)]
            done = await on_caller(self._run, tasks.retract, jobs)
        finally:
            await to_its_end(read.aclose)
        self.batches += await restored(self._writer, done)
        accepted(done)
        self._rounds += 1

    async def _grant_for(self, schema: Schema[Any, Any, Any]) -> bytes:
        """A writer for tasks with the current schema, which may have a new field since the plan."""
        if self._grant is None or self._grant[0] != schema:
            opening = writer_of(self._client, self._plan._replace(schema=schema))
            writer = await self._writers.enter_async_context(closing(opening))
            self._grant = schema, writer.to_transmittable()
        return self._grant[1]

    async def _pieces(self, read: SharedRead) -> list[Retraction]:
        """The rows to retract, for each task."""
        mode, where = self._plan.spec.mode, self._plan.spec.where
        if where is not None or (mode == OVERWRITE and not self._plan.table):
            return [Retraction(piece, where=where) for piece in await read.pieces(self._tasks, where)]
        hollow = [decode(staged.batch, self._plan.shard).batch for staged in self._staged]
        return [
            Retraction(*pieces, unique=mode != DELETE, every=mode == OVERWRITE)
            for pieces in await read._pieces_beside(self._tasks, hollow)
        ]

    async def _drop(self) -> None:
        """Delete the retractions, and end their writers."""
        batches, self.batches, self._upper, self._grant, self._rounds = self.batches, [], None, None, 0
        try:
            await discard_all(batches)
        finally:
            await self._writers.aclose()


async def restored(writer: Writer, results: Results) -> list[Batch]:
    """The batches that tasks staged."""
    batches: list[Batch] = []
    try:
        for result in results:
            if isinstance(result, StagedTask):
                batch = await writer.batch_from_transmittable(result.batch)
                batches.append(batch)
    except BaseException:
        await discard_all(batches)
        raise
    return batches


async def upper_of(writer: Writer) -> int:
    upper = int_time(await writer.fetch_recent_upper())
    if upper is None:
        raise UpperMismatch(Antichain(0), Antichain(), shard_id=writer.shard_id)
    return upper


async def _move_upper(writer: Writer, upper: int, since: Any) -> None:
    """Move the upper past since, without updates, so that the contents can be read. Otherwise a shard with an
    hour of retention that was not written for longer has no readable time."""
    if not since.elements:  # the shard is finished; the caller will notice
        return
    with suppress(UpperMismatch):
        await writer.compare_and_append([], upper, since.time + 1)
