"""What came of an append, for callers that were not told."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aiopersist.errors import Indeterminate
from aiopersist.frontier import Antichain
from aiopersist.parts.put import Uploaded
from aiopersist.resource import RELEASE_DEADLINE_S
from aiopersist.shard.attempt import Attempt
from aiopersist.write.batch import Batch, delete_all


@dataclass(frozen=True, slots=True)
class Committed:
    """The append happened; it left the shard with this upper."""

    upper: Antichain


@dataclass(frozen=True, slots=True)
class NotCommitted:
    """The append did not happen, and never will."""


@dataclass(slots=True, eq=False)
class Doubt:
    """One append, from its first step until its outcome is told, and what it staged."""

    batches: Sequence[Batch] = ()
    """Staged by the caller: consumed if it happened, the caller's again if it did not."""
    freed: Sequence[Batch] = ()
    """Those that are the caller's again."""
    uploads: list[Uploaded] = field(default_factory=list)
    """Staged by the append itself: deleted if it did not happen."""
    needless: bool = False
    """It succeeded and wrote nothing: nobody needs what was staged."""
    outcome: Committed | NotCommitted | Indeterminate | None = NotCommitted()
    """`None` while a version of it may be on its way: nothing is sent before that."""

    async def decide(self, attempt: Attempt) -> None:
        """It was settled."""
        self.outcome = Committed(attempt.after.upper) if attempt.happened else NotCommitted()
        await self.tidy()

    async def tidy(self) -> None:
        """Release what was staged, before anybody is told. Idempotent."""
        await finished(self.release())

    def release(self) -> list[asyncio.Task[None]]:
        """Free or consume the batches, and begin to delete what was staged for nothing: the tasks of that.
        Without an await, so that nothing is left half done. Idempotent."""
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
            batch._end(consumed=happened)
        return deletions

    async def repeated(self) -> None:
        """It had happened before, as its transaction number tells: nobody needs its batches, unless the
        caller has used them by now."""
        freed, self.freed = self.freed, ()
        needless = [batch for batch in freed if batch._is_free]
        for batch in needless:
            batch._begin()
        if needless:
            await finished([delete_all(needless)])

    def answer(self) -> Committed | NotCommitted:
        """The outcome; raises `Indeterminate` if it cannot be known."""
        if isinstance(self.outcome, Indeterminate):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


async def finished(deletions: list[asyncio.Task[None]]) -> None:
    """Give deletions a moment to end; whoever is cancelled leaves at once, and they go on."""
    task = asyncio.current_task()
    if deletions and not (task and task.cancelling()):
        await asyncio.wait(deletions, timeout=RELEASE_DEADLINE_S)


@dataclass(eq=False)
class Case:
    """One call whose caller was not told: its append, and when that is decided as far as it will be
    without settling."""

    transactions: Mapping[str, int]
    doubt: Doubt = field(default_factory=Doubt)
    decided: asyncio.Future[None] | None = None
