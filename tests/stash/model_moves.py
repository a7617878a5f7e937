"""Moves: openers come and go, take over, share, read or try; they call, open collections and migrate."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.stash import StashError, TypedCollection
from tests.stash.model_calls import some_call
from tests.stash.model_game import Act, Content, Game, Handle, MigrationFailed, Opener, fault
from tests.stash.model_judge import check, run
from tests.stash.model_values import KINDS, NAMES


async def play_to_the_end(game: Game, moves: int) -> None:
    async with game.lives:
        await open_stash(game, "exclusive")
        for _ in range(moves):
            await move(game)
        for mode in ("readonly", "savepoint", "shared"):
            await check(game, await open_stash(game, mode))
        last = game.openers[-1]
        assert await last.stash.migrate([unwanted] * game.content.model.version) == last.model.version


async def move(game: Game) -> None:
    if game.chance(0.08) or not any(o.mode in ("exclusive", "shared") and not o.fenced for o in game.openers):
        await open_stash(
            game, game.rng.choice(["exclusive", "exclusive", "shared", "shared", "savepoint", "readonly"])
        )
    elif len(game.openers) > 5 or game.chance(0.03):
        await close_stash(game, game.openers.pop(game.rng.randrange(len(game.openers))))
    elif game.chance(0.05):
        await migrate(game, game.rng.choice(game.openers))
    else:
        weights = [1 if o.fenced or o.mode == "readonly" else 5 for o in game.openers]
        await turn(game, *game.rng.choices(game.openers, weights))


async def open_stash(game: Game, mode: str) -> Opener:
    how = {
        "exclusive": mode == "exclusive",
        "readonly": mode == "readonly",
        "savepoint": mode == "savepoint",
    }
    stash = await game.lives.enter_async_context(ap.stash.open(game.url, **how))
    if mode == "exclusive":
        for other in game.openers:
            other.fenced |= other.mode in ("exclusive", "shared")
    content = Content(game.content.model.copy()) if mode == "savepoint" else game.content
    game.openers.append(Opener(stash, mode, content))
    await leadership(game, game.openers[-1])
    return game.openers[-1]


async def close_stash(game: Game, opener: Opener) -> None:
    await leadership(game, opener)
    await opener.stash.aclose()
    with pytest.raises(ap.InvalidUsage):
        await opener.stash.collection("c0", str, int)


async def leadership(game: Game, opener: Opener) -> None:
    if opener.fenced:
        with pytest.raises(StashError) as caught:
            await opener.stash.confirm_leadership()
        assert caught.value.is_unrecoverable
    else:
        await opener.stash.confirm_leadership()


async def turn(game: Game, opener: Opener) -> None:
    """Some call, by that opener."""
    handles = [h for h in game.handles if game.fits(h, opener)]
    if not handles or game.chance(0.3 if opener.mode == "tx" else 0.12):
        await open_collection(game, opener)
    else:
        stray = game.chance(0.03)
        await run(game, opener, some_call(game, opener, game.rng.choice(game.handles if stray else handles)))


async def open_collection(game: Game, opener: Opener) -> None:
    name = game.rng.choice(NAMES[: 3 + len(opener.model.collections)])
    there = opener.model.collections.get(name)
    types = there.types if there is not None and game.chance(0.9) else game.rng.choice(sorted(KINDS))
    if opener.fenced and name in {h.name for h in opener.known.values()}:
        return  # it may remember
    kind = KINDS[types]
    if kind.nullable or game.chance(0.5):
        act = Act("open", lambda m: m.open(name, types), lambda s: s.collection(name, kind.key, kind.val))
    else:
        typed = TypedCollection(name, kind.key, kind.val)
        act = Act("open", lambda m: m.open(name, types), typed.get)
    made = await run(game, opener, act._replace(writes=there is None), compare=False)
    if made is None:
        return
    c = opener.model.collections[name]
    c.id = c.id or made.id
    assert (made.id, made.name) == (c.id, name)
    assert [other.id for other in opener.model.collections.values()].count(c.id) == 1
    opener.known[made.id] = Handle(name, types, made.id, made)
    game.handles.append(opener.known[made.id])


async def migrate(game: Game, opener: Opener) -> None:
    version = opener.model.version
    known = max(0, version + game.rng.choice([-1, 0, 1, 1, 2]))
    fails_at = game.rng.choice([None, None, known - 1, version])
    steps = [migration(game, opener, number, number == fails_at) for number in range(known)]
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
        game.counts["migration failed"] += 1
        await check(game, opener)
    else:
        assert what == "migrated" and opener.model.version == known
        game.counts["migrated"] += known > version
        await check(game, opener)


def migration(game: Game, opener: Opener, number: int, fails: bool) -> Callable[[Any], Awaitable[None]]:
    async def step(tx: Any) -> None:
        assert number == opener.model.version
        assert not opener.fenced and opener.mode != "readonly"
        inside = Opener(tx, "tx", Content(opener.model.copy()))
        for _ in range(game.rng.randrange(10)):
            await turn(game, inside)
        if fails:
            raise MigrationFailed
        inside.model.version += 1
        opener.content.model = inside.model

    return step


async def unwanted(tx: Any) -> None:
    raise AssertionError("this step was done")
