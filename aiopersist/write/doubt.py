"""What came of an append, for callers that were not told."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from aiopersist.errors import Indeterminate
from aiopersist.frontier import Antichain
from aiopersist.shard.register import Attempt
from aiopersist.shard.upload import Upload
from aiopersist.state.model import State
from aiopersist.state.writing import repeated


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

    transactions: Mapping[str, int] = field(default_factory=dict)
    upload: Upload | None = None
    outcome: Committed | NotCommitted | Indeterminate | None = NotCommitted()
    """`None` while a version of it may be on its way: nothing is sent before that."""

    @property
    def decided(self) -> bool:
        return self.outcome is not None

    def decide(self, attempt: Attempt, state: State) -> None:
        """It was settled. A transaction that is recorded all the same counts as ours: that is what a
        transaction number means."""
        if attempt.happened:
            self.outcome = Committed(attempt.result.upper)
            return
        if self.upload is not None:
            self.upload.discard()
        if repeated(state, self.transactions):
            self.outcome = Committed(state.upper)
        else:
            self.outcome = NotCommitted()

    def answer(self) -> Committed | NotCommitted:
        """The outcome; raises `Indeterminate` if it cannot be known."""
        if isinstance(self.outcome, Indeterminate):
            raise self.outcome
        assert self.outcome is not None
        return self.outcome
