"""Turns a DataFrame into one append, for the engine, for `format("aiopersist")`, and for streams.

1. *Plan* (`plan.py`): the shard, and how columns become updates.
2. Tasks *stage* batches (`tasks.stage`), all under one writer.
3. For an upsert or an overwrite, tasks *retract* the replaced rows (`replace.py`). A deletion is an upsert of
   keys only: keys are staged for the tasks, and only the retractions are appended. A deletion by a condition
   stages nothing. 4. *Commit*: one compare-and-append of everything. Without a column of times, all batches
   get the current upper as their time, on a wall clock now; after a mismatch the newer upper, with more
   retractions.

With a column of times, the upper must be that of the plan; otherwise the write fails.

Everything here is a coroutine of the bridge's loop. Only `Run` blocks, on the thread that waits for the job.
"""

from collections.abc import Sequence
from contextlib import AsyncExitStack

from aiopersist.base.errors import InvalidUsage, UpperMismatch, UsageKind
from aiopersist.base.frontier import Antichain
from aiopersist.base.portal import closing, to_its_end
from aiopersist.client.client import Client
from aiopersist.spark.location import SparkLocation
from aiopersist.spark.plan import APPEND, DELETE, WritePlan, Writer, is_done, writer_of
from aiopersist.spark.replace import Replacement, Results, Run, restored, upper_of
from aiopersist.spark.tasks import StagedTask, accepted
from aiopersist.state.writing import last_complete
from aiopersist.write.batch import Batch, discard_all, rebound
from aiopersist.write.checks import Txn
from aiopersist.write.handle import time_of_write


class WriteJob:
    """The driver's part of a write, after tasks have staged."""

    def __init__(
        self, client: Client, location: SparkLocation, plan: WritePlan, run: Run, tasks_: int
    ) -> None:
        """`tasks_`: the number of tasks for retractions, approximately."""
        self._client = client
        self._location = location
        self._plan = plan
        self._spec = plan.spec
        self._run = run
        self._tasks = tasks_

    async def commit(self, results: Results) -> int:
        """Append everything once. Returns the time at which it is complete. An error means that nothing was
        appended and staged batches are deleted, except `Indeterminate`: then the outcome is unknown."""
        plan = self._plan
        async with closing(writer_of(self._client, plan)) as writer, AsyncExitStack() as ends:
            batches = await restored(writer, results)
            ends.push_async_callback(to_its_end, discard_all, batches)
            staged = accepted(results)
            if await is_done(self._client, plan):  # before the check of the upper
                return last_complete(await writer.fetch_recent_upper())
            if not plan.upper.elements:
                raise UpperMismatch(Antichain(0), Antichain(), shard_id=plan.shard)
            if self._spec.mode != APPEND:
                return await self._replace(writer, batches, staged)
            if self._spec.time is None:
                return await self._append(writer, batches)
            return await self._append_timed(writer, batches, staged)

    async def _replace(self, writer: Writer, batches: list[Batch], staged: Sequence[StagedTask]) -> int:
        """Append with retractions of the contents; after an append of others, retract its changes, too."""
        new = [] if self._spec.mode == DELETE else batches
        replacement = Replacement(
            self._client, self._location, self._plan, self._run, self._tasks, writer, staged
        )
        async with replacement:
            while True:
                upper = await replacement.catch_up()
                try:
                    return await _append_at(writer, [*new, *replacement.batches], upper, self._spec.txn)
                except UpperMismatch as error:
                    if error.current == Antichain():
                        raise

    async def _append(self, writer: Writer, batches: list[Batch]) -> int:
        while True:
            try:
                return await _append_at(writer, batches, await upper_of(writer), self._spec.txn)
            except UpperMismatch as error:
                if error.current == Antichain():
                    raise

    async def _append_timed(self, writer: Writer, batches: list[Batch], staged: Sequence[StagedTask]) -> int:
        """Append at the times of the rows, if the upper is still that of the plan."""
        lower = self._plan.upper
        first = min((task.first for task in staged if task.rows), default=None)
        if first is not None and not lower.less_equal(first):
            text = f"time {first} is not at or beyond the upper {lower}"
            raise InvalidUsage(UsageKind.UPDATE_NOT_BEYOND_LOWER, text, time=first, lower=lower)
        upper = lower.join(Antichain(max((task.last + 1 for task in staged if task.rows), default=0)))
        for batch in batches:
            rebound(batch, lower, upper)
        await writer.compare_and_append_batch(batches, lower, upper, self._spec.txn)
        return last_complete(writer.upper)


async def _append_at(writer: Writer, batches: Sequence[Batch], upper: int, txn: Txn | None) -> int:
    """Append batches at the time `upper`, on a wall clock now, if the upper is still `upper`."""
    moved = (
        last_complete(batch.upper) for batch in batches
    )  # maybe by an earlier attempt: times never go back
    time = max(await time_of_write(writer, upper), *moved, upper)
    for batch in batches:
        batch.rewrite_ts(time, time + 1)
    await writer.compare_and_append_batch(batches, upper, time + 1, txn)
    return time if txn is None else last_complete(writer.upper)  # a repeat is complete at some time before
