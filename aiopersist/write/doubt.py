"""What came of an append, for callers that were not told."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aiopersist.errors import Indeterminate
from aiopersist.frontier import Antichain
from aiopersist.resource import RELEASE_DEADLINE_S
from aiopersist.shard.attempt import Attempt
from aiopersist.shard.upload import Upload
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
    uploads: list[Upload] = field(default_factory=list)
    """Staged by the append itself: deleted if it did not happen."""
    needless: bool = False
    """It succeeded and wrote nothing: nobody needs what was staged."""
    outcome: Committed | NotCommitted | Indeterminate | None = NotCommitted()
    """`None` while a version of it may be on its way: nothing is sent before that."""

    async def decide(self, attempt: Attempt) -> None:
        """It was settled."""
        self.outcome = Committed(attempt.result.upper) if attempt.happened else NotCommitted()
        await self.tidy()

    async def tidy(self) -> None:
        """Release or consume what was staged, and delete what was staged for nothing, before anybody is
        told; whoever is cancelled leaves at once. Idempotent."""
        if self.outcome is None:
            return
        batches, self.batches = self.batches, ()
        self.freed = batches if isinstance(self.outcome, NotCommitted) and not self.needless else self.freed
        deletions = []
        if isinstance(self.outcome, NotCommitted):
            deletions = [task for upload in self.uploads if (task := upload.discard()) is not None]
            if self.needless and batches:
                deletions.append(delete_all(batches))
                batches = ()
        for batch in batches:
            batch._end(consumed=not isinstance(self.outcome, NotCommitted))
        task = asyncio.current_task()
        if deletions and not (task and task.cancelling()):
            await asyncio.wait(deletions, timeout=RELEASE_DEADLINE_S)

    async def repeated(self) -> None:
        """It had happened before, as its transaction number tells: nobody needs its batches, unless the
        caller has used them by now."""
        freed, self.freed = self.freed, ()
        needless = [batch for batch in freed if batch._is_free]
        for batch in needless:
            batch._begin()
        if needless:
            await asyncio.wait([delete_all(needless)], timeout=RELEASE_DEADLINE_S)

    def answer(self) -> Committed | NotCommitted:
        """The outcome; raises `Indeterminate` if it cannot be known."""
        if isinstance(self.outcome, Indeterminate):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome


@dataclass(eq=False)
class Case:
    """One call whose caller was not told: its append, and when that is decided as far as it will be
    without settling."""

    transactions: Mapping[str, int]
    doubt: Doubt = field(default_factory=Doubt)
    decided: asyncio.Future[int] | None = None
