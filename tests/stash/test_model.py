"""Goal: after any calls, by any opener and in any order, a stash agrees with a list of updates
(`stash_model.py`), on every backend: its results, its refusals, and that a refused call has changed nothing.
Openers come and go, take over, share, read or try; collections are consolidated at any moment, migrations
fail or succeed.

A failure names its game: the seed and the calls up to it."""

import datetime as dt
import importlib.util
import os
import random
import sys
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import aiopersist as ap
import aiopersist.stash.session
from aiopersist.stash import AppendBatch, NothingSealed, StaleLower, StashError, TypedCollection
from tests.support.schemas import NAN


def _module(path: str) -> Any:
    """A module beside this file: tests are no package."""
    file = Path(__file__).parent / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


oracle, model = _module("../data/data_oracle.py"), _module("stash_model.py")
EMPTY, NO_TIME, MAX, MIN, Refused = model.EMPTY, model.NO_TIME, model.MAX, model.MIN, model.Refused

BACKENDS = ["mem", "sqlite", "postgres"]
LONG_GAMES = int(os.environ.get("AIOPERSIST_TEST_STASH_GAMES", "100"))  # on each backend

_some = {"amount": Decimal("1.5"), "at": dt.datetime(2020, 1, 1, tzinfo=dt.UTC), "day": dt.date(2020, 1, 1)}
_vals = [
    oracle.Val(**_some, color=oracle.Color.RED),
    oracle.Val(**_some, color=oracle.Color.BLUE, scores=[None, NAN], ref=uuid.UUID(int=1)),
    oracle.Val(**_some, color=oracle.Color.BLUE, inners=[None, oracle.Inner(text="é", score=-0.0)]),
]
_keys = [
    oracle.Key(name="", number=None),
    oracle.Key(name="", number=-(2**63), inner=oracle.Inner(text="")),
    oracle.Key(name="\uffff", number=1, inner=oracle.Inner(text="a", score=NAN)),
    oracle.Key(name="\U00010000", number=1),
]
_texts = ["", "a", "\uffff", "\U00010000", "it's \\ \"", "a\x00b"]
_floats = [0.0, -1.5, float("inf"), float("-inf"), 5e-324, NAN]
KINDS = {
    "str-int": model.Kind(
        str, int, _texts, [0, 1, -1, MAX, MIN], [None, 1, b"a", "\ud800"], [None, "a", 2**63]
    ),
    "models": model.Kind(oracle.Key, oracle.Val, _keys, _vals, [None, "a", _vals[0]], [None, _keys[0]]),
    "bytes-floats": model.Kind(
        *(bytes, list[float | None], [b"", b"\x00", b"\xff", b"a" * 300]),
        *([[], [NAN], [None, 1.5], [float("inf")]], ["a", None], [["a"], 1.5, None]),
    ),
    "optional-str": model.Kind(
        int | None, str, [None, 0, -1, MAX], _texts, ["a", 2**63], [None, 1, "\ud800"]
    ),
    "float-optional": model.Kind(
        float, int | None, _floats, [None, 0, -1], ["a", None], ["a", 2**63], nullable=True
    ),
    "float-str": model.Kind(float, str, _floats, ["a", "b"], ["a", None], [None, 1]),
}
NAMES = [f"c{number}" for number in range(12)]
TABLES = set(NAMES[::2])  # mostly with one val per key

READS = ["iter", "peek", "peek_one", "peek_timestamp", "since", "upper", "make_batch"]
KEY_READS = ["iter_key", "peek_key_one"]
VALUE_FAULTS = {"InvalidUpdate", "InvalidUsage", "CodecMismatch", "TypeError"}
LIVELY = (
    *("DiffOverflow", "InvalidUpdate", "InvalidUsage", "CodecMismatch", "StashError", "StaleLower"),
    *("NothingSealed", "fenced", "migrated", "migration failed", "compensated"),
    *(f"{what}, done" for what in (*READS, *KEY_READS, "open", "update_many", "seal", "compact", "append")),
    *(f"{what}, done" for what in ("consolidate_batch", "seal_batch", "compact_batch", "append held")),
    *(f"{what}, done" for what in ("upsert", "upsert_key", "delete", "insert_without_overwrite")),
)


class Handle(NamedTuple):
    name: str
    types: str
    id: int
    real: Any


@dataclass
class Place:
    """What is there; a draft has its own."""

    model: Any


@dataclass
class Opener:
    stash: Any
    mode: str
    place: Place
    fenced: bool = False
    known: dict[int, Handle] = field(default_factory=dict)

    @property
    def model(self) -> Any:
        return self.place.model


class Act(NamedTuple):
    """A call on the model and on a stash."""

    what: str
    model: Callable[[Any], Any]
    real: Callable[[Any], Awaitable[Any]]
    writes: bool = True


class MigrationFailed(Exception):
    pass


def canonical(value: Any) -> Any:
    try:
        return oracle.canonical(value)
    except UnicodeEncodeError:  # no text
        return repr(value)


def told(value: Any) -> Any:
    """What a call returned, comparable."""
    return canonical(list(value.items()) if isinstance(value, dict) else value)


def frontier(time: float) -> ap.Antichain:
    return ap.Antichain() if time == EMPTY else ap.Antichain(int(time))


def fault(error: Exception) -> str:
    if isinstance(error, StashError) and error.is_unrecoverable:
        return "fenced"
    return type(error).__name__


class Game:
    def __init__(self, seed: int, url: str) -> None:
        self.rng = random.Random(seed)
        self.url = url
        self.counts: Counter[str] = Counter()
        self.place = Place(model.Model(KINDS, oracle.rank, canonical))
        self.openers: list[Opener] = []
        self.handles: list[Handle] = []
        self.held: list[Any] = []
        """Batches that are appended later."""
        self.lives = AsyncExitStack()

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    # --- openers ---------------------------------------------------------------------------------

    async def play(self, moves: int) -> None:
        async with self.lives:
            await self.open("exclusive")
            for _ in range(moves):
                await self.move()
            for mode in ("readonly", "savepoint", "shared"):
                await self.check(await self.open(mode))
            last = self.openers[-1]
            assert await last.stash.migrate([self.unwanted] * self.place.model.version) == last.model.version

    async def move(self) -> None:
        if self.chance(0.08) or not any(
            o.mode in ("exclusive", "shared") and not o.fenced for o in self.openers
        ):
            await self.open(
                self.rng.choice(["exclusive", "exclusive", "shared", "shared", "savepoint", "readonly"])
            )
        elif len(self.openers) > 5 or self.chance(0.03):
            await self.close(self.openers.pop(self.rng.randrange(len(self.openers))))
        elif self.chance(0.05):
            await self.migrate(self.rng.choice(self.openers))
        else:
            weights = [1 if o.fenced or o.mode == "readonly" else 5 for o in self.openers]
            await self.turn(*self.rng.choices(self.openers, weights))

    async def open(self, mode: str) -> Opener:
        how = {
            "exclusive": mode == "exclusive",
            "readonly": mode == "readonly",
            "savepoint": mode == "savepoint",
        }
        stash = await self.lives.enter_async_context(ap.stash.open(self.url, **how))
        if mode == "exclusive":
            for other in self.openers:
                other.fenced |= other.mode in ("exclusive", "shared")
        place = Place(self.place.model.copy()) if mode == "savepoint" else self.place
        self.openers.append(Opener(stash, mode, place))
        await self.leadership(self.openers[-1])
        return self.openers[-1]

    async def close(self, opener: Opener) -> None:
        await self.leadership(opener)
        await opener.stash.aclose()
        with pytest.raises(ap.InvalidUsage):
            await opener.stash.collection("c0", str, int)

    async def leadership(self, opener: Opener) -> None:
        if opener.fenced:
            with pytest.raises(StashError) as caught:
                await opener.stash.confirm_leadership()
            assert caught.value.is_unrecoverable
        else:
            await opener.stash.confirm_leadership()

    # --- calls -----------------------------------------------------------------------------------

    async def turn(self, opener: Opener) -> None:
        """Some call, by that opener."""
        handles = [h for h in self.handles if self.fits(h, opener)]
        if not handles or self.chance(0.3 if opener.mode == "tx" else 0.12):
            await self.open_collection(opener)
        else:
            stray = self.chance(0.03)
            await self.run(opener, self.act(opener, self.rng.choice(self.handles if stray else handles)))

    def fits(self, h: Handle, opener: Opener) -> bool:
        c = opener.model.collections.get(h.name)
        return c is not None and (c.id, c.types) == (h.id, h.types)

    async def open_collection(self, opener: Opener) -> None:
        name = self.rng.choice(NAMES[: 3 + len(opener.model.collections)])
        there = opener.model.collections.get(name)
        types = there.types if there is not None and self.chance(0.9) else self.rng.choice(sorted(KINDS))
        if opener.fenced and name in {h.name for h in opener.known.values()}:
            return  # it may remember
        kind = KINDS[types]
        if kind.nullable or self.chance(0.5):
            act = Act("open", lambda m: m.open(name, types), lambda s: s.collection(name, kind.key, kind.val))
        else:
            typed = TypedCollection(name, kind.key, kind.val)
            act = Act("open", lambda m: m.open(name, types), typed.get)
        made = await self.run(opener, act._replace(writes=there is None), compare=False)
        if made is None:
            return
        c = opener.model.collections[name]
        c.id = c.id or made.id
        assert (made.id, made.name) == (c.id, name)
        assert [other.id for other in opener.model.collections.values()].count(c.id) == 1
        opener.known[made.id] = Handle(name, types, made.id, made)
        self.handles.append(opener.known[made.id])

    def act(self, opener: Opener, h: Handle) -> Act:
        rng = self.rng
        way = rng.choices(
            ["read", "key", "update", "advance", "batch", "append", "typed"], [4, 2, 6, 4, 1, 5, 6]
        )[0]
        if h.name in TABLES and way in ("update", "append") and self.chance(0.95):
            way = "typed"
        if way == "read":
            return self.read(h, rng.choice(READS))
        if way == "key":
            what, key = rng.choice(KEY_READS), self.key(h)
            call = lambda s: getattr(s, what)(h.real, key)  # noqa: E731
            return Act(what, lambda m: getattr(m, what)(h, key), call, writes=False)
        if way == "update":
            return self.update(h, self.entries(opener, h))
        if way == "advance":
            what = rng.choice(["seal", "seal", "compact", "consolidate"])
            step = self.step(opener, h, what)
            return Act(what, lambda m: getattr(m, what)(*step), lambda s: getattr(s, what)(*self.real(step)))
        if way == "batch":
            what = rng.choice(["seal", "compact", "consolidate"])
            near = [other for other in self.handles if self.fits(other, opener)]
            steps = [self.step(opener, rng.choice([h, *near]), what) for _ in range(rng.randint(1, 3))]
            given = [self.real(step) if len(step) > 1 else step[0].real for step in steps]
            return Act(
                *(f"{what}_batch", lambda m: m.several(what, steps)),
                lambda s: getattr(s, f"{what}_batch")(given),
            )
        return self.append(opener, h) if way == "append" else self.typed(opener, h)

    def read(self, h: Handle, what: str) -> Act:
        async def real(stash: Any) -> Any:
            found = await getattr(stash, what)(h.real)
            if what == "make_batch":
                assert (found.collection_id, found.entries) == (h.id, [])
                return (
                    self.shown(found.lower),
                    self.shown(found.upper),
                    self.shown(found.compact),
                    found.timestamp,
                )
            return self.shown(found) if what in ("since", "upper") else found

        return Act(what, lambda m: getattr(m, what)(h), real, writes=False)

    def shown(self, antichain: ap.Antichain) -> float:
        (time,) = antichain.elements or (EMPTY,)
        return time  # type: ignore[return-value]

    def update(self, h: Handle, entries: list[Any]) -> Act:
        if len(entries) == 1 and self.chance(0.5):
            real: Any = lambda s: s.update(h.real, *entries[0])  # noqa: E731
        else:
            real = lambda s: s.update_many(h.real, iter(entries) if len(entries) > 1 else entries)  # noqa: E731
        return Act("update_many", lambda m: m.update_many(h, entries), real)

    def step(self, opener: Opener, h: Handle, what: str) -> tuple[Any, ...]:
        return (h,) if what == "consolidate" else (h, self.bound(opener, h, since=what == "compact"))

    def real(self, step: tuple[Any, ...]) -> tuple[Any, ...]:
        h, *rest = step
        return (h.real, *(self.given(time) for time in rest))

    def given(self, time: float) -> Any:
        """A frontier as one gives it."""
        if time == NO_TIME:
            return self.rng.choice([-1, 2**63, (0, 1), ap.Antichain((0, 0)), True])
        return frontier(time) if time == EMPTY or self.chance(0.5) else time

    def append(self, opener: Opener, h: Handle) -> Act:
        near = [h, *(other for other in opener.known.values() if self.fits(other, opener))]
        chosen = [h, *self.rng.choices(near, k=self.rng.choice([0, 1, 2]))]
        if self.chance(0.95):
            chosen = list({h.id: h for h in chosen}.values())
        if self.chance(0.9):
            chosen = [h for h in chosen if h.id in opener.known] or chosen
        batches = [self.batch(opener, h) for h in chosen]
        what = "append"
        if self.chance(0.2):
            self.held.append(batches)
        elif self.held and self.chance(0.2):
            what, batches = "append held", self.held.pop(0)
        known = dict(opener.known)
        return Act(
            *(what, lambda m: m.append(batches, known)),
            lambda s: s.append(
                AppendBatch(b.id, *map(self.given, b[1:4]), 0, list(b.entries)) for b in batches
            ),
        )

    def batch(self, opener: Opener, h: Handle) -> Any:
        lower = opener.model.collections[h.name].upper if h.name in opener.model.collections else 0
        if self.chance(0.05):
            lower = self.bound(opener, h)
        upper = EMPTY if lower >= MAX else max(lower, 0) + self.rng.choice([0, 1, 1, 2])
        compact = max(upper - 1, 0) if upper < EMPTY else lower
        upper, compact = (self.bound(opener, h) if self.chance(0.08) else f for f in (upper, compact))
        entries = self.entries(opener, h) if self.chance(0.8) else []
        return model.Batch(h.id, lower, upper, compact, entries)

    def typed(self, opener: Opener, h: Handle) -> Act:
        """A typed call on a collection that exists, so that the call does not create it."""
        kind = KINDS[h.types]
        if kind.nullable or not self.fits(h, opener):
            return self.read(h, "peek_one")
        c = TypedCollection(h.name, kind.key, kind.val)
        key, val = self.key(h), self.val(h)
        entries = [(self.key(h), self.val(h)) for _ in range(self.rng.choice([0, 1, 3]))]
        gone = {told(self.key(h)) for _ in range(2)}
        predicate = lambda k, v: told(k) in gone  # noqa: E731
        calls: dict[str, tuple[Any, ...]] = {
            "peek_one": (),
            "peek_key_one": (key,),
            "upper": (),
            "insert_without_overwrite": (key, val),
            "insert_many_without_overwrite": (entries,),
            "upsert_key": (key, val),
            "upsert": (entries,),
            "delete": (predicate,),
        }
        what = self.rng.choice(sorted(calls))

        async def real(stash: Any) -> Any:
            if not opener.fenced:
                await c.get(stash)
                opener.known[h.id] = h
            found = await getattr(c, what)(stash, *calls[what])
            return self.shown(found) if what == "upper" else found

        writes = what not in ("peek_one", "peek_key_one", "upper")
        return Act(what, lambda m: getattr(m, what)(h, *calls[what]), real, writes)

    # --- values ----------------------------------------------------------------------------------

    def key(self, h: Handle) -> Any:
        kind = KINDS[h.types]
        return self.fresh(self.rng.choice(kind.keys if self.chance(0.98) else kind.bad_keys))

    def val(self, h: Handle) -> Any:
        kind = KINDS[h.types]
        return self.fresh(self.rng.choice(kind.vals if self.chance(0.98) else kind.bad_vals))

    def fresh(self, value: Any) -> Any:
        """A NaN that is not the same object as any other."""
        return float("nan") if isinstance(value, float) and value != value else value

    def bound(self, opener: Opener, h: Handle, *, since: bool = False) -> float:
        c = opener.model.collections.get(h.name)
        low, high = (c.since, c.upper) if c is not None else (0, 0)
        if self.chance(0.08):
            return self.rng.choice([NO_TIME, 0, MAX, EMPTY, EMPTY, EMPTY])
        near = [high, high, high - 1, low, low + 1] if since else [high, high + 1, high + 1, high + 2, low]
        time = self.rng.choice(near)
        return time if 0 <= time <= MAX else EMPTY

    def entries(self, opener: Opener, h: Handle) -> list[Any]:
        c = opener.model.collections.get(h.name)
        upper, updates = (c.upper, c.updates) if c is not None else (0, [])
        return [self.entry(h, upper, updates) for _ in range(self.rng.choice([1, 1, 2, 4]))]

    def entry(self, h: Handle, upper: float, updates: list[Any]) -> Any:
        rng = self.rng
        upper = min(upper, MAX)
        time: Any = min(upper + rng.choice([0, 0, 0, 1, 2]), MAX)
        if self.chance(0.05):
            time = rng.choice([0, max(upper - 1, 0), MAX, -1, 2**63, (1, 1), None])
        if updates and self.chance(0.3):  # undo something
            data, _, diff = rng.choice(updates)
            return data, time, min(-diff, MAX)
        few = [1] * 10 + [-1] * 4 + [2, -2, 0] + [MAX, MIN, 2**62, -(2**62)]
        diff: Any = rng.choice(few if self.chance(0.99) else [2**63, None, 1.5])
        return (self.key(h), self.val(h)), time, diff

    # --- judgement -------------------------------------------------------------------------------

    async def run(self, opener: Opener, act: Act, *, compare: bool = True) -> Any:
        """Do it on both; what the real one returned, `None` if it was refused."""
        before, after = opener.model, opener.model.copy()
        refused = result = error = found = None
        try:
            result = act.model(after)
        except Refused as e:
            refused = e
        try:
            found = await act.real(opener.stash)
        except Exception as e:
            error = e
        note = (
            opener.mode,
            opener.fenced,
            act.what,
            refused and refused.kinds,
            refused and refused.name,
            error,
        )
        if opener.fenced or (opener.mode == "readonly" and act.writes):
            if error is None:  # of a call that changes nothing
                assert not opener.fenced and refused is None and after == before, note
            else:
                kinds = {"fenced"} if opener.fenced else {"StashError"}
                kinds |= refused.kinds & VALUE_FAULTS if refused else set()
                kinds |= {"StashError"} if refused and refused.early else set()
                if refused and not opener.fenced and after == before:  # what it reads is refused
                    kinds |= refused.kinds
                assert fault(error) in kinds, note
                self.counts[fault(error)] += 1
            if self.chance(0.3):
                await self.check(next((o for o in self.openers if not o.fenced), opener))
            return found
        if refused is None:
            if error is not None:
                raise AssertionError(note) from error
            assert not compare or told(found) == told(result), (note, found, result)
            opener.place.model = after
            self.overflows(before, after)
        else:
            if error is None or fault(error) not in refused.kinds:
                raise AssertionError(note, found) from error
            self.attributes(error, refused, after)
            opener.place.model = await self.settled(opener, [after, *refused.after])
        self.counts[fault(error) if error else f"{act.what}, done"] += 1
        return found

    def attributes(self, error: Exception, refused: Any, state: Any) -> None:
        if isinstance(error, StashError) and refused.name:
            assert repr(refused.name) in str(error)
        if isinstance(error, StaleLower | NothingSealed):
            c = state.collections[error.collection]
            assert str(error.upper) == str(frontier(c.upper)) and str(error.upper) in str(error)
        if isinstance(error, NothingSealed):
            assert str(error.since) == str(frontier(c.since)) and str(error.since) in str(error)

    def overflows(self, before: Any, after: Any) -> None:
        """Count sums that came back into range."""
        for name, c in before.collections.items():
            if (
                c.since < EMPTY
                and self.overflowed(before, c)
                and not self.overflowed(after, after.collections[name])
            ):
                self.counts["compensated"] += 1

    def overflowed(self, state: Any, c: Any) -> bool:
        if all(abs(d) < 2**60 for *_, d in c.updates):
            return False
        try:
            state.iterated(c, c.updates)
        except Refused:
            return True
        return False

    async def settled(self, opener: Opener, states: list[Any]) -> Any:
        """That of the states which is there."""
        for state in states[:-1]:
            if await self.differs(opener, state) is None:
                return state
        difference = await self.differs(opener, states[-1])
        assert difference is None, difference
        return states[-1]

    async def check(self, opener: Opener) -> None:
        if not opener.fenced:
            difference = await self.differs(opener, opener.model)
            assert difference is None, difference

    async def differs(self, opener: Opener, state: Any) -> Any:
        """Where the stash has something else than the model, in all collections."""
        handles = {h.name: h for h in self.handles if self.fits(h, Opener(None, "", Place(state)))}
        for h in handles.values():
            for what in ("since", "upper", "iter"):
                act = self.read(h, what)
                try:
                    expected = told(act.model(state))
                except Refused as refused:
                    expected = refused.kinds
                try:
                    found = told(await act.real(opener.stash))
                except ap.Error as error:
                    found = {fault(error)}
                if found != expected:
                    return opener.mode, h.name, what, found, expected
        return None

    # --- migrations ------------------------------------------------------------------------------

    async def migrate(self, opener: Opener) -> None:
        version = opener.model.version
        known = max(0, version + self.rng.choice([-1, 0, 1, 1, 2]))
        fails_at = self.rng.choice([None, None, known - 1, version])
        steps = [self.migration(opener, number, number == fails_at) for number in range(known)]
        try:
            found = await opener.stash.migrate(steps)
        except (StashError, MigrationFailed) as error:
            what = type(error).__name__ if isinstance(error, MigrationFailed) else fault(error)
        else:
            what = "migrated"
            assert found == known
        if opener.fenced:
            assert what == "fenced"
        elif opener.mode == "readonly" or known < version:
            assert what == "StashError"
        elif fails_at is not None and version <= fails_at < known:
            assert what == "MigrationFailed"
            self.counts["migration failed"] += 1
            await self.check(opener)
        else:
            assert what == "migrated" and opener.model.version == known
            self.counts["migrated"] += known > version
            await self.check(opener)

    def migration(self, opener: Opener, number: int, fails: bool) -> Callable[[Any], Awaitable[None]]:
        async def step(tx: Any) -> None:
            assert number == opener.model.version
            assert not opener.fenced and opener.mode != "readonly"
            inside = Opener(tx, "tx", Place(opener.model.copy()))
            for _ in range(self.rng.randrange(10)):
                await self.turn(inside)
            if fails:
                raise MigrationFailed
            inside.model.version += 1
            opener.place.model = inside.model

        return step

    async def unwanted(self, tx: Any) -> None:
        raise AssertionError("this step was done")


@pytest.fixture(params=BACKENDS)
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Names an empty place of that backend at every call."""

    server = request.getfixturevalue("postgres_server") if request.param == "postgres" else None

    def place() -> str:
        name = uuid.uuid4().hex[:16]
        if server is not None:
            return server.url(f"t_{name}")  # type: ignore[no-any-return]
        return f"sqlite://{tmp_path / name}.db" if request.param == "sqlite" else f"mem://{name}"

    return place


async def play(seed: int, url: str, monkeypatch: pytest.MonkeyPatch, moves: int = 120) -> Counter[str]:
    few = random.Random(seed).choice([1, 2, 5, 256])
    monkeypatch.setattr(aiopersist.stash.session, "CONSOLIDATE_ROWS_MIN", few)
    game = Game(seed, url)
    try:
        await game.play(moves)
    except Exception as error:
        error.add_note(f"seed {seed}, on {url}")
        raise
    return game.counts


@pytest.mark.parametrize("seed", range(4))
async def test_short_games(seed: int, places: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    await play(seed, places(), monkeypatch)


@pytest.mark.long
@pytest.mark.timeout(0)
async def test_long_games(places: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tox -e long`; `AIOPERSIST_TEST_STASH_GAMES` says how many."""
    counts: Counter[str] = Counter()
    for seed in range(1000, 1000 + LONG_GAMES):
        counts += await play(seed, places(), monkeypatch, moves=200)
    missing = [what for what in LIVELY if not counts[what]]
    assert not missing or LONG_GAMES < 20, (missing, counts)
