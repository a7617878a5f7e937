"""Calls, drawn from the seed: each as one on the model and one on a stash."""

from typing import Any

import aiopersist as ap
from aiopersist.stash import AppendBatch, TypedCollection
from tests.stash.model_draws import given, some_bound, some_entries, some_key, some_val
from tests.stash.model_game import Act, Game, Handle, Opener
from tests.stash.model_values import KINDS, TABLES, told
from tests.stash.stash_model import EMPTY, MAX, Batch

READS = ["iter", "peek", "peek_one", "peek_timestamp", "since", "upper", "make_batch"]
KEY_READS = ["iter_key", "peek_key_one"]


def some_call(game: Game, opener: Opener, h: Handle) -> Act:
    rng = game.rng
    way = rng.choices(
        ["read", "key", "update", "advance", "batch", "append", "typed"], [4, 2, 6, 4, 1, 5, 6]
    )[0]
    if h.name in TABLES and way in ("update", "append") and game.chance(0.95):
        way = "typed"
    if way == "read":
        return read_call(game, h, rng.choice(READS))
    if way == "key":
        what, key = rng.choice(KEY_READS), some_key(game, h)
        call = lambda s: getattr(s, what)(h.real, key)  # noqa: E731
        return Act(what, lambda m: getattr(m, what)(h, key), call, writes=False)
    if way == "update":
        return update_call(game, h, some_entries(game, opener, h))
    if way == "advance":
        what = rng.choice(["seal", "seal", "compact", "consolidate"])
        step = arguments(game, opener, h, what)
        return Act(
            what, lambda m: getattr(m, what)(*step), lambda s: getattr(s, what)(*given_arguments(game, step))
        )
    if way == "batch":
        what = rng.choice(["seal", "compact", "consolidate"])
        near = [other for other in game.handles if game.fits(other, opener)]
        steps = [arguments(game, opener, rng.choice([h, *near]), what) for _ in range(rng.randint(1, 3))]
        given = [given_arguments(game, step) if len(step) > 1 else step[0].real for step in steps]
        return Act(
            *(f"{what}_batch", lambda m: m.several(what, steps)),
            lambda s: getattr(s, f"{what}_batch")(given),
        )
    return append_call(game, opener, h) if way == "append" else typed_call(game, opener, h)


def read_call(game: Game, h: Handle, what: str) -> Act:
    async def real(stash: Any) -> Any:
        found = await getattr(stash, what)(h.real)
        if what == "make_batch":
            assert (found.collection_id, found.entries) == (h.id, [])
            return (
                shown(found.lower),
                shown(found.upper),
                shown(found.compact),
                found.timestamp,
            )
        return shown(found) if what in ("since", "upper") else found

    return Act(what, lambda m: getattr(m, what)(h), real, writes=False)


def update_call(game: Game, h: Handle, entries: list[Any]) -> Act:
    if len(entries) == 1 and game.chance(0.5):
        real: Any = lambda s: s.update(h.real, *entries[0])  # noqa: E731
    else:
        real = lambda s: s.update_many(h.real, iter(entries) if len(entries) > 1 else entries)  # noqa: E731
    return Act("update_many", lambda m: m.update_many(h, entries), real)


def arguments(game: Game, opener: Opener, h: Handle, what: str) -> tuple[Any, ...]:
    return (h,) if what == "consolidate" else (h, some_bound(game, opener, h, since=what == "compact"))


def given_arguments(game: Game, step: tuple[Any, ...]) -> tuple[Any, ...]:
    h, *rest = step
    return (h.real, *(given(game, time) for time in rest))


def append_call(game: Game, opener: Opener, h: Handle) -> Act:
    near = [h, *(other for other in opener.known.values() if game.fits(other, opener))]
    chosen = [h, *game.rng.choices(near, k=game.rng.choice([0, 1, 2]))]
    if game.chance(0.95):
        chosen = list({h.id: h for h in chosen}.values())
    if game.chance(0.9):
        chosen = [h for h in chosen if h.id in opener.known] or chosen
    batches = [some_batch(game, opener, h) for h in chosen]
    what = "append"
    if game.chance(0.2):
        game.held.append(batches)
    elif game.held and game.chance(0.2):
        what, batches = "append held", game.held.pop(0)
    known = dict(opener.known)
    return Act(
        *(what, lambda m: m.append(batches, known)),
        lambda s: s.append(
            AppendBatch(b.id, *(given(game, time) for time in b[1:4]), 0, list(b.entries)) for b in batches
        ),
    )


def some_batch(game: Game, opener: Opener, h: Handle) -> Any:
    lower = opener.model.collections[h.name].upper if h.name in opener.model.collections else 0
    if game.chance(0.05):
        lower = some_bound(game, opener, h)
    upper = EMPTY if lower >= MAX else max(lower, 0) + game.rng.choice([0, 1, 1, 2])
    compact = max(upper - 1, 0) if upper < EMPTY else lower
    upper, compact = (some_bound(game, opener, h) if game.chance(0.08) else f for f in (upper, compact))
    entries = some_entries(game, opener, h) if game.chance(0.8) else []
    return Batch(h.id, lower, upper, compact, entries)


def typed_call(game: Game, opener: Opener, h: Handle) -> Act:
    """A typed call on a collection that exists, so that the call does not create it."""
    kind = KINDS[h.types]
    if kind.nullable or not game.fits(h, opener):
        return read_call(game, h, "peek_one")
    c = TypedCollection(h.name, kind.key, kind.val)
    key, val = some_key(game, h), some_val(game, h)
    entries = [(some_key(game, h), some_val(game, h)) for _ in range(game.rng.choice([0, 1, 3]))]
    gone = {told(some_key(game, h)) for _ in range(2)}
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
    what = game.rng.choice(sorted(calls))

    async def real(stash: Any) -> Any:
        if not opener.fenced:
            await c.get(stash)
            opener.known[h.id] = h
        found = await getattr(c, what)(stash, *calls[what])
        return shown(found) if what == "upper" else found

    writes = what not in ("peek_one", "peek_key_one", "upper")
    return Act(what, lambda m: getattr(m, what)(h, *calls[what]), real, writes)


def shown(antichain: ap.Antichain) -> float:
    (time,) = antichain.elements or (EMPTY,)
    return time  # type: ignore[return-value]
