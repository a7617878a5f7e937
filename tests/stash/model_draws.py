"""Arguments of calls, drawn from the seed: mostly legal, and close to what is there."""

from typing import Any

import aiopersist as ap
from tests.stash.model_game import Game, Handle, Opener
from tests.stash.model_values import KINDS, frontier
from tests.stash.stash_model import EMPTY, MAX, MIN, NO_TIME


def some_key(game: Game, h: Handle) -> Any:
    kind = KINDS[h.types]
    return fresh(game.rng.choice(kind.keys if game.chance(0.98) else kind.bad_keys))


def some_val(game: Game, h: Handle) -> Any:
    kind = KINDS[h.types]
    return fresh(game.rng.choice(kind.vals if game.chance(0.98) else kind.bad_vals))


def some_bound(game: Game, opener: Opener, h: Handle, *, since: bool = False) -> float:
    c = opener.model.collections.get(h.name)
    low, high = (c.since, c.upper) if c is not None else (0, 0)
    if game.chance(0.08):
        return game.rng.choice([NO_TIME, 0, MAX, EMPTY, EMPTY, EMPTY])
    near = [high, high, high - 1, low, low + 1] if since else [high, high + 1, high + 1, high + 2, low]
    time = game.rng.choice(near)
    return time if 0 <= time <= MAX else EMPTY


def some_entries(game: Game, opener: Opener, h: Handle) -> list[Any]:
    c = opener.model.collections.get(h.name)
    upper, updates = (c.upper, c.updates) if c is not None else (0, [])
    return [some_entry(game, h, upper, updates) for _ in range(game.rng.choice([1, 1, 2, 4]))]


def some_entry(game: Game, h: Handle, upper: float, updates: list[Any]) -> Any:
    rng = game.rng
    upper = min(upper, MAX)
    time: Any = min(upper + rng.choice([0, 0, 0, 1, 2]), MAX)
    if game.chance(0.05):
        time = rng.choice([0, max(upper - 1, 0), MAX, -1, 2**63, (1, 1), None])
    if updates and game.chance(0.3):  # undo something
        data, _, diff = rng.choice(updates)
        return data, time, min(-diff, MAX)
    few = [1] * 10 + [-1] * 4 + [2, -2, 0] + [MAX, MIN, 2**62, -(2**62)]
    diff: Any = rng.choice(few if game.chance(0.99) else [2**63, None, 1.5])
    return (some_key(game, h), some_val(game, h)), time, diff


def given(game: Game, time: float) -> Any:
    """A frontier as one gives it."""
    if time == NO_TIME:
        return game.rng.choice([-1, 2**63, (0, 1), ap.Antichain((0, 0)), True])
    return frontier(time) if time == EMPTY or game.chance(0.5) else time


def fresh(value: Any) -> Any:
    """A NaN that is not the same object as any other."""
    return float("nan") if isinstance(value, float) and value != value else value
