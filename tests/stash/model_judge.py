"""Checks: a call on a stash returned what the model says, or was refused as it says and changed nothing."""

from typing import Any

import aiopersist as ap
from aiopersist.stash import NothingSealed, StaleLower, StashError
from tests.stash.model_calls import read_call
from tests.stash.model_game import Act, Content, Game, Opener, fault
from tests.stash.model_values import frontier, told
from tests.stash.stash_model import EMPTY, Refused

VALUE_FAULTS = {"InvalidUpdate", "InvalidUsage", "CodecMismatch", "TypeError"}


async def run(game: Game, opener: Opener, act: Act, *, compare: bool = True) -> Any:
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
            game.counts[fault(error)] += 1
        if game.chance(0.3):
            await check(game, next((o for o in game.openers if not o.fenced), opener))
        return found
    if refused is None:
        if error is not None:
            raise AssertionError(note) from error
        assert not compare or told(found) == told(result), (note, found, result)
        opener.content.model = after
        count_overflows(game, before, after)
    else:
        if error is None or fault(error) not in refused.kinds:
            raise AssertionError(note, found) from error
        check_attributes(game, error, refused, after)
        opener.content.model = await settled(game, opener, [after, *refused.after])
    game.counts[fault(error) if error else f"{act.what}, done"] += 1
    return found


def check_attributes(game: Game, error: Exception, refused: Any, state: Any) -> None:
    if isinstance(error, StashError) and refused.name:
        assert repr(refused.name) in str(error)
    if isinstance(error, StaleLower | NothingSealed):
        c = state.collections[error.collection]
        assert str(error.upper) == str(frontier(c.upper)) and str(error.upper) in str(error)
    if isinstance(error, NothingSealed):
        assert str(error.since) == str(frontier(c.since)) and str(error.since) in str(error)


def count_overflows(game: Game, before: Any, after: Any) -> None:
    """Count sums that came back into range."""
    for name, c in before.collections.items():
        if (
            c.since < EMPTY
            and overflowed(game, before, c)
            and not overflowed(game, after, after.collections[name])
        ):
            game.counts["compensated"] += 1


def overflowed(game: Game, state: Any, c: Any) -> bool:
    if all(abs(d) < 2**60 for *_, d in c.updates):
        return False
    try:
        state.iterated(c, c.updates)
    except Refused:
        return True
    return False


async def settled(game: Game, opener: Opener, states: list[Any]) -> Any:
    """That of the states which is there."""
    for state in states[:-1]:
        if await differs(game, opener, state) is None:
            return state
    difference = await differs(game, opener, states[-1])
    assert difference is None, difference
    return states[-1]


async def check(game: Game, opener: Opener) -> None:
    if not opener.fenced:
        difference = await differs(game, opener, opener.model)
        assert difference is None, difference


async def differs(game: Game, opener: Opener, state: Any) -> Any:
    """Where the stash has something else than the model, in all collections."""
    handles = {h.name: h for h in game.handles if game.fits(h, Opener(None, "", Content(state)))}
    for h in handles.values():
        for what in ("since", "upper", "iter"):
            act = read_call(game, h, what)
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
