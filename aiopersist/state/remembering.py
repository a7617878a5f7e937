"""Ids of `once=` and numbers of `txn=` that a shard remembers without data."""

from collections.abc import Mapping
from math import inf
from typing import Any

from msgspec import Struct

from aiopersist.state.command import Commit, Context, Keep, commit, live
from aiopersist.state.model import State, TransactionRecord
from aiopersist.state.once import UNMARKED, Once
from aiopersist.state.writing import RepeatedMark, repeat_of, too_many


class Remember(Struct, frozen=True):
    """Record these ids and numbers in a commit at `time` that other shards share. A repeat is refused
    (`RepeatedMark`), so that the other shards are not written either."""

    transactions: Mapping[str, int]
    once: Once = UNMARKED
    time: int = 0
    transactions_max: float = inf

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if repeat_of(state, context.now, self) is not None:
            return Keep(error=RepeatedMark("it was done before"))
        if refusal := too_many(state, self.transactions, self.transactions_max):
            return Keep(error=refusal)
        numbers = {a: TransactionRecord(number=n, at=context.now) for a, n in self.transactions.items()}
        ids: Any = self.once.changes(context.now, self.time) if self.once.hashes else {}
        return commit(state, context, transactions=numbers, once=ids)

    def happened(self, state: State) -> bool | None:
        """False if another commit recorded one of the ids. Else only the other shards can tell."""
        times = [state.once.time_of(hashed, -inf) for hashed in self.once.hashes]
        return False if any(time not in (None, self.time) for time in times) else None
