"""The outcome of an append whose caller was not told. `session.py` finds it out."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aiopersist.errors import Indeterminate
from aiopersist.frontier import Antichain
from aiopersist.parts.put import Uploaded
from aiopersist.resource import RELEASE_DEADLINE_S
from aiopersist.shard.attempt import Attempt
from aiopersist.state.once import UNMARKED, Once
from aiopersist.write.staged import StagedBatch, claim_free, delete_all


@dataclass(frozen=True, slots=True)
class Committed:
    """The append happened; it left the shard with this upper."""

    upper: Antichain


@dataclass(frozen=True, slots=True)
class NotCommitted:
    """The append did not happen, and never will."""


@dataclass(slots=True, eq=False)
class PendingAppend:
    """One append until its outcome is told, and the parts that were staged for it."""

    batches: Sequence[StagedBatch] = ()
    """Staged by the caller: consumed if the append happened, free again if it did not."""
    freed: Sequence[StagedBatch] = ()
    """The `batches` that are free again, since the append did not happen."""
    uploads: list[Uploaded] = field(default_factory=list)
    """Staged by the append itself: deleted if it did not happen."""
    needless: bool = False
    """Whether it succeeded and wrote nothing: then nothing that was staged is needed."""
    outcome: Committed | NotCommitted | Indeterminate | None = NotCommitted()
    """`None` while a version of it may be on its way; until then nothing is sent."""

    async def decide(self, attempt: Attempt) -> None:
        """Take the outcome of the settled attempt."""
        self.outcome = Committed(attempt.after.upper) if attempt.happened else NotCommitted()
        await self.tidy()

    async def tidy(self) -> None:
        """Release the staged parts, before the caller is told. Idempotent."""
        await wait_briefly(self.release())

    def release(self) -> list[asyncio.Task[None]]:
        """Free or consume the batches, and begin to delete parts that were staged in vain; returns the tasks
        of these deletions. There is no await, so nothing is left half done. Idempotent."""
        if self.outcome is None:
            return []
        batches, self.batches = self.batches, ()
        happened = not isinstance(self.outcome, NotCommitted)
        deletions = []
        if self.needless or not happened:
            deletions = [task for upload in self.uploads if (task := upload.discard()) is not None]
        if self.needless and happened and batches:
            return [*deletions, delete_all(batches)]
        self.freed = self.freed if happened else batches
        for batch in batches:
            batch.consume() if happened else batch.unclaim()
        return deletions

    async def repeated(self) -> None:
        """Its transaction number says that it happened before: delete the batches that it freed, unless the
        caller has used them since."""
        freed, self.freed = self.freed, ()
        if needless := claim_free(freed):
            await wait_briefly([delete_all(needless)])

    def answer(self) -> Committed | NotCommitted:
        """The outcome; raises `Indeterminate` if it cannot be known."""
        if isinstance(self.outcome, Indeterminate):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


async def wait_briefly(deletions: list[asyncio.Task[None]]) -> None:
    """Give deletions a moment to end; a caller that is cancelled does not wait. They go on in any case."""
    task = asyncio.current_task()
    if deletions and not (task and task.cancelling()):
        await asyncio.wait(deletions, timeout=RELEASE_DEADLINE_S)


@dataclass(eq=False)
class UnsettledCall:
    """A call whose caller was not told its outcome."""

    transactions: Mapping[str, int]
    once: Once = UNMARKED
    append: PendingAppend = field(default_factory=PendingAppend)
    decided: asyncio.Future[None] | None = None
    """Done once the call is decided as far as it can be without settling; `None`: it is so already."""
