"""Goal: the games find the bugs that transactions have when one rule is left out: each within a few games,
which hold without it.

Each plants one bug in the library, by replacing one function of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.state.once import UNMARKED
from aiopersist.table import table
from aiopersist.table.commit import group, operation
from aiopersist.table.transaction import transaction
from tests.support.virtual import played
from tests.table.game import Game, Size

SEEDS = 300  # games until it must be found: the rarest is found in one of ten
MANY = 60
SIZE = Size(tasks=(3, 6), moves=8, cuts=3)
Plant = Callable[[pytest.MonkeyPatch], None]


def a_lost_update(patch: pytest.MonkeyPatch) -> None:
    """What an update made of an older val is committed."""
    patch.setattr(operation.RunOutcome, "is_valid_for", lambda *_: True)


def a_write_skew(patch: pytest.MonkeyPatch) -> None:
    """Keys that a transaction only read are not compared at the commit."""
    conflicts = transaction.Touched.conflicts

    def only_written(self: Any, val_of: Any, more: Any = ()) -> list[Any]:
        read, self.read = self.read, {key: val for key, val in self.read.items() if key in self.written}
        try:
            return conflicts(self, val_of, more)
        finally:
            self.read = read

    patch.setattr(transaction.Touched, "conflicts", only_written)


def a_phantom(patch: pytest.MonkeyPatch) -> None:
    """Ranges that a transaction read are not compared at the commit."""
    patch.setattr(transaction.Touched, "_has_any", lambda *_: False)


def a_torn_commit(patch: pytest.MonkeyPatch) -> None:
    """The shards of a commit are written one after the other."""
    append_all = group.append_all

    async def one_by_one(appends: Sequence[Any], joined: Sequence[Any] = (), *, own_task: bool) -> None:
        for append in appends:
            await append_all([append], joined, own_task=own_task)

    patch.setattr(group, "append_all", one_by_one)


def a_stale_get(patch: pytest.MonkeyPatch) -> None:
    """No get looks at the head."""
    vals = table.Table._vals
    patch.setattr(table.Table, "_vals", lambda self, keys, stale: vals(self, keys, True))


def an_answer_that_is_old(patch: pytest.MonkeyPatch) -> None:
    """What wrote nothing is answered without a look at the head."""

    async def at_once(self: Any, group: Any, plan: Any, looked: Any) -> Any:
        return {table for operation in group for table in operation.participants}

    patch.setattr(group.TableCommits, "_unmoved", at_once)


def a_forgotten_id(patch: pytest.MonkeyPatch) -> None:
    """No commit records ids, and none is looked up."""
    patch.setattr(group, "Once", lambda hashes, keep_s: UNMARKED)


def a_shared_val(patch: pytest.MonkeyPatch) -> None:
    """Operations of one group do not see each other."""

    def val_of(self: Any, key: str) -> str | None:
        return self.before(key)  # type: ignore[no-any-return]

    patch.setattr(operation.Overlay, "val_of", val_of)


BUGS: list[Plant] = [
    a_lost_update,
    a_write_skew,
    a_phantom,
    a_torn_commit,
    a_stale_get,
    an_answer_that_is_old,
    a_forgotten_id,
    a_shared_val,
]
RATES = {
    "get": 2.0,
    "get_many": 1.0,
    "put": 3.0,
    "insert": 2.0,
    "update": 4.0,
    "delete": 2.0,
    "transact": 8.0,
    "look": 1.0,
    "transfer": 3.0,
}


SPECIAL = {
    a_stale_get: {"get": 4.0, "put": 4.0, "delete": 1.0},
    an_answer_that_is_old: {"insert": 4.0, "delete": 4.0, "get": 1.0},
}
"""Those that need it."""


def searched(bug: Plant, patch: pytest.MonkeyPatch) -> tuple[int, BaseException]:
    """The number of games until it was found, and what was found: by the check, or by the library itself."""
    bug(patch)
    for seed in range(SEEDS):
        if error := failed(seed, SPECIAL.get(bug, RATES)):
            return seed, error
    raise LookupError(f"not found in {SEEDS} games")


def failed(seed: int, rates: Mapping[str, float]) -> BaseException | None:
    found: BaseExceptionGroup[Any] | None = None
    try:
        played(seed, lambda: Game(seed, rates, calm=True, size=SIZE).play())
    except* (AssertionError, ap.Error) as errors:
        found = errors
    return found


def test_without_a_bug_nothing_is_found() -> None:
    for seed in range(1):
        assert failed(seed, RATES) is None


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rates", [RATES, *SPECIAL.values()])
def test_without_a_bug_nothing_is_found_in_any_game(rates: dict[str, float]) -> None:
    for seed in range(MANY):
        if (error := failed(seed, rates)) is not None:
            raise error


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_it_is_found(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    number, error = searched(bug, monkeypatch)
    print(number, repr(error)[:600])
