"""Goal: group commit on Postgres, in all orders of the steps of its statements, to a bound: two clients,
entries of different keys and of one, a connection that dies before or after the commit, a statement that is
refused, and a caller that is cancelled. Each entry is answered with its own outcome: none is applied twice,
none is told lost that was won, or that could still win, and what happens to one changes nothing for its
neighbours.

Each rule of `storage/postgres/group.py` is needed: without it an order is found in which that is not so."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aiopersist.base.errors import Indeterminate, StorageUnavailable
from aiopersist.storage.consensus import Entry
from aiopersist.storage.postgres import group
from aiopersist.storage.postgres.group import GroupCommit
from aiopersist.storage.postgres.pool import Pool, ServerRefused
from aiopersist.storage.postgres.sql import statements
from tests.exhaustive import postgres_model
from tests.exhaustive.kit import Cast, played
from tests.exhaustive.postgres_model import BAD, Postgres

OLD = b"old"


class Calls:
    """Entries, each by a caller whose name begins with that of its client, and what each was told."""

    def __init__(self, model: Postgres, entries: dict[str, Entry], later: str = "") -> None:
        self.model = model
        self.later = later
        self.entries = entries
        self.told: dict[str, str] = {}
        self.before: dict[str, int | None] = {}
        """The heads when they called."""
        for key in {entry.key for entry in entries.values() if entry.expected is not None}:
            model.heads[key], model.log[key, 0] = 0, OLD

    def caller(self, name: str) -> Callable[[], Awaitable[None]]:
        client = name[0]

        async def call() -> None:
            try:
                if name == self.later:
                    await self.model._step(name, "calls")
                    self.model.tell(client, name)
                self.before[name] = self.model.heads.get(self.entries[name].key)
                won = await self.model.group(client).compare_and_set(self.entries[name])
                self.told[name] = "won" if won else "lost"
            except asyncio.CancelledError:
                self.told[name] = "cancelled"
            except Indeterminate:
                self.told[name] = "unknown"
            except StorageUnavailable:
                self.told[name] = "refused"
            self.model.tell(name, self.told[name])

        return call

    async def check(self) -> None:
        model = self.model
        for key, head in model.heads.items():
            there = sorted(seqno for where, seqno in model.log if where == key)
            assert there == list(range(head + 1)), f"{key} has versions {there}, and its head is {head}"
        made = {data: place for place, data in model.log.items() if data != OLD}
        assert len(made) == sum(data != OLD for data in model.log.values()), f"applied twice: {model.log}"
        for name, (key, expected, data) in self.entries.items():
            place = (key, 0 if expected is None else expected + 1)
            assert made.get(data, place) == place, f"{name} is at {made[data]}, not at {place}"
            self.check_told(name, self.told[name], data in made, place in model.log)

    def check_told(self, name: str, told: str, is_there: bool, is_taken: bool) -> None:
        """What one caller was told, given whether its entry, or any other, is at its place."""
        data = self.entries[name].data
        if told == "won":
            assert is_there, f"{name} was told that it won"
        elif told == "lost":
            key, expected, _ = self.entries[name]
            never = self.before[name] == expected == self.model.heads.get(key)
            assert not is_there and not never, f"{name} was told that it lost"
        elif told == "refused":
            assert not is_there and data in self.model.refused, f"{name} was told that it was refused"
        elif told == "unknown":
            assert data in self.model.unknown, f"{name} was not told its outcome, and no answer was lost"


def cast(
    faults: dict[str, list[str]] | None = None,
    *,
    cancelled: str = "",
    later: str = "",
    **places: tuple[str, int | None],
) -> Cast:
    """Callers, each with a key and the seqno that it expects, who call at once, but for the one that calls
    `later`, at any moment. Their data is their name, or `BAD` for one that is named so."""

    async def begin(model: Any) -> Any:
        entries = {
            name: Entry(*place, BAD if name.endswith("bad") else name.encode())
            for name, place in places.items()
        }
        calls = Calls(model, entries, later)
        model.faults = {client: list(kinds) for client, kinds in (faults or {}).items()}
        model.cancels = {cancelled: 1} if cancelled else {}
        return {name: calls.caller(name) for name in places}, calls.check

    return begin


DIES, REFUSED = {"a": ["dies"]}, {"a": ["refused"]}
CASTS: dict[str, Cast] = {
    "two keys": cast(a1=("x", 0), a2=("y", 0), b1=("y", 0), b2=("x", 0)),
    "one key": cast(a1=("x", 0), a2=("x", 1), a3=("y", 0), later="a2"),
    "dies": cast(DIES, a1=("x", 0), a2=("y", 0), b1=("x", 0)),
    "dies, then another": cast(DIES, a1=("x", 0), a2=("y", 0), a3=("x", 1), later="a3"),
    "the other dies": cast({"b": ["dies"]}, a1=("x", 0), a2=("y", 0), b1=("x", 0)),
    "one is bad": cast(a1bad=("x", 0), a2=("y", 0), b1=("y", 0)),
    "cancelled": cast(cancelled="a1", a1=("x", 0), a2=("y", 0), b1=("x", 0)),
    "cancelled, dies": cast(DIES, cancelled="a1", a1=("x", 0), a2=("y", 0), a3=("x", 0)),
}
LARGER: dict[str, Cast] = {
    "first versions": cast(DIES, a1=("z", None), b1=("z", None), a2=("y", 0)),
    "refused": cast(REFUSED, a1=("x", 0), a2=("y", 0), b1=("x", 0)),
    "one key, of two clients": cast(a1=("x", 0), a2=("x", 0), b1=("x", 0)),
    "two keys, one later": cast(a1=("x", 0), a2=("y", 0), b1=("y", 0), b2=("x", 0), later="a2"),
    "dies, one later": cast(DIES, a1=("x", 0), a2=("y", 0), b1=("x", 0), later="a2"),
    "dies, and one key": cast(DIES, a1=("x", 0), a2=("x", 0), a3=("x", 1), later="a3"),
    "cancelled, one later": cast(cancelled="a1", a1=("x", 0), a2=("y", 0), b1=("x", 0), later="a2"),
    "all": cast(
        {"a": ["dies", "refused"], "b": ["dies"]},
        cancelled="a1",
        a1=("x", 0),
        a2=("y", 0),
        b1=("x", 0),
    ),
}


@pytest.mark.parametrize("name", CASTS)
def test_each_is_told_its_own_outcome(name: str) -> None:
    assert played(CASTS[name], model=Postgres()) > 10


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", LARGER)
def test_each_is_told_its_own_outcome_in_larger_models(name: str) -> None:
    assert played(LARGER[name], model=Postgres()) > 100


# --- each rule is needed --------------------------------------------------------------------------


def a_group_takes_all(patch: pytest.MonkeyPatch) -> None:
    """A statement may have several entries of one key."""

    def everyone(self: GroupCommit) -> list[Any]:
        taken = list(self._waiting)
        self._waiting.clear()
        return taken

    patch.setattr(GroupCommit, "_next_group", everyone)


def what_was_skipped_has_lost(patch: pytest.MonkeyPatch) -> None:
    """An entry that did not win is not sent again."""
    send = GroupCommit._send_together

    async def once(self: GroupCommit, waiting: list[Any]) -> list[Any]:
        for one in await send(self, waiting):
            one.settle(False)
        return []

    patch.setattr(GroupCommit, "_send_together", once)


def a_refusal_is_of_all(patch: pytest.MonkeyPatch) -> None:
    """An error of severity ERROR is told to each entry of the statement."""

    async def told(self: Pool, use: Any) -> Any:
        try:
            return await pool_use(self, use)
        except ServerRefused as error:
            raise StorageUnavailable(str(error)) from error

    pool_use = Pool.use
    patch.setattr(Pool, "use", told)


def what_has_no_answer_is_sent_again(patch: pytest.MonkeyPatch) -> None:
    """A lost connection is taken for a refusal."""

    async def again(self: Pool, use: Any) -> Any:
        try:
            return await pool_use(self, use)
        except Indeterminate as error:
            raise ServerRefused(str(error)) from error

    pool_use = Pool.use
    patch.setattr(Pool, "use", again)


def what_has_no_answer_did_not_happen(patch: pytest.MonkeyPatch) -> None:
    settle_all = group._settle_all

    def refused(waiting: Any, error: BaseException) -> None:
        settle_all(waiting, StorageUnavailable("it did not happen"))

    patch.setattr(group, "_settle_all", refused)


def a_cancelled_caller_cancels_its_statement(patch: pytest.MonkeyPatch) -> None:
    call = GroupCommit.compare_and_set

    async def stops(self: GroupCommit, entry: Entry) -> bool:
        try:
            return await call(self, entry)
        except asyncio.CancelledError:
            for task in self._pool._tasks:
                task.cancel()
            raise

    patch.setattr(GroupCommit, "compare_and_set", stops)


def a_cancelled_caller_is_answered(patch: pytest.MonkeyPatch) -> None:
    """Nobody looks whether a caller still waits: the answer fails there, and those after it get none."""

    def settle(self: Any, outcome: bool | Exception) -> None:
        if isinstance(outcome, Exception):
            if not self.outcome.done():
                self.outcome.set_exception(outcome)
        else:
            self.outcome.set_result(outcome)

    patch.setattr(group._Waiting, "settle", settle)


def a_connection_that_died_is_used_again(patch: pytest.MonkeyPatch) -> None:
    put_back = Pool._put_back
    patch.setattr(Pool, "_put_back", lambda self, connection, usable: put_back(self, connection, True))


def rows_are_locked_in_any_order(patch: pytest.MonkeyPatch) -> None:
    """The statement waits for its locks, and takes them as the entries come."""
    texts = statements("s")
    text = texts["append_together"].replace("SKIP LOCKED", "").replace("ORDER BY", "")
    patch.setattr(postgres_model, "statements", lambda schema: {**texts, "append_together": text})


WITHOUT: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str]] = {
    "one entry per key": (a_group_takes_all, "one key, of two clients"),
    "what was skipped is sent again": (what_was_skipped_has_lost, "the other dies"),
    "a refusal is of one": (a_refusal_is_of_all, "one is bad"),
    "no answer is unknown": (what_has_no_answer_is_sent_again, "dies"),
    "no answer is no refusal": (what_has_no_answer_did_not_happen, "dies"),
    "statements go on": (a_cancelled_caller_cancels_its_statement, "cancelled"),
    "who is gone is left out": (a_cancelled_caller_is_answered, "cancelled"),
    "dead connections": (a_connection_that_died_is_used_again, "dies, then another"),
    "no lock is waited for": (rows_are_locked_in_any_order, "two keys"),
}


@pytest.mark.parametrize("without", WITHOUT)
def test_without_a_rule_somebody_is_told_a_lie(without: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, name = WITHOUT[without]
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"told|nobody can go on|applied|is at"):
        played({**CASTS, **LARGER}[name], model=Postgres())
