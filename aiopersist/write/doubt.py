"""What came of an append, for callers that were not told."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from aiopersist.errors import Indeterminate
from aiopersist.frontier import Antichain
from aiopersist.resource import RELEASE_DEADLINE_S
from aiopersist.shard.attempt import Attempt
from aiopersist.shard.upload import Upload


@dataclass(frozen=True, slots=True)
class Committed:
    """The append happened; it left the shard with this upper."""

    upper: Antichain


@dataclass(frozen=True, slots=True)
class NotCommitted:
    """The append did not happen, and never will."""


@dataclass(slots=True, eq=False)
class Doubt:
    """One append, from its first step until its outcome is told."""

    upload: Upload | None = None
    outcome: Committed | NotCommitted | Indeterminate | None = NotCommitted()
    """`None` while a version of it may be on its way: nothing is sent before that."""

    async def decide(self, attempt: Attempt) -> None:
        """It was settled."""
        self.outcome = Committed(attempt.result.upper) if attempt.happened else NotCommitted()
        await self.tidy()

    async def tidy(self) -> None:
        """Delete what was staged for nothing, before anybody is told; whoever is cancelled leaves at once."""
        if self.upload is None or not isinstance(self.outcome, NotCommitted):
            return
        deletion, task = self.upload.discard(), asyncio.current_task()
        if deletion is not None and not (task and task.cancelling()):
            await asyncio.wait([deletion], timeout=RELEASE_DEADLINE_S)

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
