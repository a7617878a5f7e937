"""The retractions of an upsert, an overwrite or a deletion: of the contents, then of what others append until
the commit.

1. The contents as of an upper are read once, and tasks retract the rows that go (`tasks.retract`).
2. If another writer came first, the changes since that upper are read and retracted in the same way. A row
   that came is taken back; of a row that went, its retraction is taken back. So the sum of all retractions is
   that of the contents as of the newer upper, and a try costs what came since, not all contents again.
3. Where that history is gone, or after `ROUNDS` rounds, all begins again.
"""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, Self, TypeAlias

from aiopersist.base.errors import SinceViolation, UpperMismatch
from aiopersist.base.frontier import Antichain, int_time
from aiopersist.client.client import Client
from aiopersist.data.types.schema import Schema
from aiopersist.read.shared_read import SharedRead
from aiopersist.spark import tasks
from aiopersist.spark.bridge import closing, on_caller, to_its_end
from aiopersist.spark.location import SparkLocation
from aiopersist.spark.plan import DELETE, OVERWRITE, WritePlan, Writer, writer_of
from aiopersist.spark.tasks import Retraction, StagedTask, TaskRefused, accepted
from aiopersist.write.batch import Batch, discard_all
from aiopersist.write.transmit import decode

Results: TypeAlias = Sequence[StagedTask | TaskRefused]
Run = Callable[[Callable[..., StagedTask], Sequence[tuple[Any, ...]]], Results]
"""Runs a task for each tuple of arguments, and blocks until all are done."""

ROUNDS = 100  # each leaves a batch of each task


class Replacement:
    """See the header. Used `async with`: at the end the retractions that were not appended are deleted."""

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
        """Retract the rows of the contents as of the upper that `catch_up` has returned."""
        self._client = client
        self._location = location
        self._plan = plan
        self._run = run
        self._tasks = tasks_
        self._writer = writer
        self._staged = staged
        self._seen: int | None = None
        """That upper; `None` at the beginning."""
        self._rounds = 0
        self._writers = AsyncExitStack()
        """Of the retractions; `BatchExpired` for a batch whose writer was closed."""
        self._grant: tuple[Schema[Any, Any, Any], bytes] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await to_its_end(self._drop)

    async def catch_up(self) -> int:
        """Retract what the contents have at the upper, which is returned."""
        if self._seen is not None and self._rounds < ROUNDS:
            upper = await upper_of(self._writer)
            with suppress(SinceViolation):
                read = await self._client.workers.shared_read(self._plan.shard, start=self._seen, end=upper)
                await self._retract(read)
                self._seen = upper
                return upper
        await self._drop()
        upper, whole = await self._whole()
        if whole is not None:
            await self._retract(whole)
        self._seen = upper
        return upper

    async def _whole(self) -> tuple[int, SharedRead | None]:
        """The upper, and a read of the rows to retract; `None` for none. An upsert, and a write of a table,
        always reads: its tasks also look for keys that the new rows have twice."""
        while True:
            upper = await upper_of(self._writer)
            if not upper and self._plan.spec.mode == OVERWRITE and not self._plan.table:
                return upper, None
            try:
                if not upper:
                    return upper, await self._client.workers.shared_read(self._plan.shard, start=0, end=0)
                return upper, await self._client.workers.shared_read(self._plan.shard, upper - 1)
            except SinceViolation as error:
                await _pass(self._writer, upper, error.since)

    async def _retract(self, read: SharedRead) -> None:
        """Retract the rows of a read that go."""
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
        """A writer for tasks, by the schema as it is now: it may have got a field since the plan."""
        if self._grant is None or self._grant[0] != schema:
            opening = writer_of(self._client, self._plan._replace(schema=schema))
            writer = await self._writers.enter_async_context(closing(opening))
            self._grant = schema, writer.to_transmittable()
        return self._grant[1]

    async def _pieces(self, read: SharedRead) -> list[Retraction]:
        """For each task: the rows that go."""
        mode, where = self._plan.spec.mode, self._plan.spec.where
        if where is not None or (mode == OVERWRITE and not self._plan.table):
            return [Retraction(piece, where=where) for piece in await read.pieces(self._tasks)]
        hollow = [decode(one.batch, self._plan.shard).batch for one in self._staged]
        return [
            Retraction(*pieces, unique=mode != DELETE, every=mode == OVERWRITE)
            for pieces in await read._pieces_beside(self._tasks, hollow)
        ]

    async def _drop(self) -> None:
        """Delete the retractions, and end their writers."""
        batches, self.batches, self._seen, self._grant, self._rounds = self.batches, [], None, None, 0
        try:
            await discard_all(batches)
        finally:
            await self._writers.aclose()


async def restored(writer: Writer, results: Results) -> list[Batch]:
    """The batches of the tasks that staged one."""
    batches: list[Batch] = []
    try:
        for one in results:
            if isinstance(one, StagedTask):
                batch = await writer.batch_from_transmittable(one.batch)
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


async def _pass(writer: Writer, upper: int, since: Any) -> None:
    """Move the upper past since, with nothing appended: then the contents can be read. A shard that keeps its
    last hour of history, and was not written for longer, has none left before its upper."""
    if not since.elements:  # the shard is finished, as the caller finds out
        return
    with suppress(UpperMismatch):
        await writer.compare_and_append([], upper, since.time + 1)
