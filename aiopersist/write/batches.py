"""An append of staged batches."""

from collections.abc import Mapping, Sequence

from aiopersist.base.errors import InvalidUsage, UsageKind, shown
from aiopersist.base.frontier import minimum
from aiopersist.write.assemble import AppendableBatch, assembled, check_append
from aiopersist.write.batch import Batch, inside
from aiopersist.write.pending import OfHandle, PendingAppend
from aiopersist.write.staged import StagedBatch


class BatchesAppend(PendingAppend, eq=False):
    """The batches are the `updates`."""

    def _take(self) -> None:
        self.updates = tuple(self.updates)

    @property
    def traces(self) -> list[Mapping[str, str]]:
        return [inside(batch).trace for batch in self.updates if isinstance(batch, Batch)]

    @property
    def can_begin_again(self) -> bool:
        return True

    async def prepare(self) -> None:
        batches = _distinct(self.updates, self.session)
        check_append([_value(batch) for batch in batches], self.lower, self.upper)
        for batch in batches:
            batch.claim()
        self.batches = batches

    async def stage(self) -> bool:
        since, values = minimum(self.session.schema.time_length), [_value(batch) for batch in self.batches]
        self.command = self.command_of(assembled(values, self.lower, self.upper, since))
        return True


def _value(batch: StagedBatch) -> AppendableBatch:
    return AppendableBatch(batch.hollow, batch.rewrite)


def _distinct(batches: Sequence[Batch], session: OfHandle) -> list[StagedBatch]:
    """The batches; each must be free, of this shard, and listed once."""
    by_id: dict[str, StagedBatch] = {}
    for batch in batches:
        if not isinstance(batch, Batch):
            raise TypeError(f"{shown(batch)} is not an aiopersist.Batch")
        staged = inside(batch)
        staged.check_free()
        if batch.shard_id != session.shard.id:
            text = f"batch {batch.id} is of shard {batch.shard_id}, not of {session.shard.id}"
            raise InvalidUsage(UsageKind.BATCH_NOT_FROM_THIS_SHARD, text)
        if batch.id in by_id:
            raise InvalidUsage(UsageKind.CONSUMED, f"batch {batch.id} is listed twice")
        by_id[batch.id] = staged
    return list(by_id.values())
