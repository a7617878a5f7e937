"""Checks: the batches of a stream are those that the rules of arrangements allow, after every step."""

from itertools import pairwise
from typing import Any

from tests.indexed.game.model import Write, summed
from tests.indexed.game.state import TRANSIENT, Game, Player


async def inspected(game: Game, player: Player) -> dict[str, Any] | None:
    """All streams from within; `None` where that says nothing."""
    if player.background or not game.decided:
        return None
    try:
        return {name: await player.ix.inspect(name) for name in game.model.streams}
    except TRANSIENT:
        assert game.faulty
        return None


def next_batch(game: Game, command: Any) -> dict[str, tuple[int, int, int, int]] | None:
    """The unsealed batches that the command makes, if it is alone."""
    if not isinstance(command, Write) or not game.decided:
        return None
    after, before = game.model.copy(), game.model
    if after.run(command, 0)[0] != "seqno":
        return None
    times: dict[str, list[int]] = {}
    for name, rows in command.entries:
        times.setdefault(name, []).extend(row[2] for row in rows)
    return {
        name: (before.streams[name].seqno, after.seqno, min(some), max(some))
        for name, some in times.items()
        if some
    }


async def check_batches(game: Game, batch: dict[str, tuple[int, int, int, int]]) -> None:
    assert game.owner is not None
    views = await inspected(game, game.owner)
    for name, expected in batch.items() if views is not None else ():
        assert views is not None
        last = views[name].unsealed[-1]
        if name in game.possible.shared:
            assert expected[0] <= last[0] < last[1], (last, expected)
            expected = (last[0], *expected[1:])
        assert last == expected, (last, expected)
        game.possible.shared.discard(name)


def check_step(game: Game, name: str, before: Any, after: Any) -> None:
    """Drained, evicted, and one batch trimmed."""
    check_view(game, name, after)
    kept = game.model.streams[name]
    moved = [row for row in kept.rows if before.trace_upper <= row[2] < kept.seal]
    trace, upper = list(before.trace), before.trace_upper
    if moved:
        trace.append((upper, kept.seal, 0, 0, len(summed(moved))))
        upper = kept.seal
    assert after.trace == trace, (name, before, after)
    above = [b for b in before.unsealed if b[3] >= upper]
    partly = [b for b in above if b[2] < upper]
    if partly:
        at = above.index(partly[0])
        least = min(r[2] for r in kept.rows if upper <= r[2] <= partly[0][3])
        assert after.unsealed[at][2] >= max(least, upper), (name, before, after)
        above[at] = (*partly[0][:2], after.unsealed[at][2], partly[0][3])
    assert after.unsealed == above, (name, before, after)


def check_view(game: Game, name: str, view: Any) -> None:
    """What the rules promise at every moment."""
    kept = game.model.streams[name]
    assert (view.seal, view.since) == (kept.seal, kept.since), (name, view)
    assert view.trace_upper == (view.trace[-1][1] if view.trace else 0) <= view.seal
    assert all(a[1] == b[0] and a[3] >= b[3] for a, b in pairwise(view.trace)), view
    assert all(lower < upper and since <= kept.since for lower, upper, since, _, _ in view.trace), view
    assert all(a[1] <= b[0] for a, b in pairwise(view.unsealed)), view
    assert all(b[0] < b[1] and b[2] <= b[3] for b in view.unsealed), view
    rows = [row for row in kept.rows if row[2] < view.trace_upper]
    assert sum(b[4] for b in view.trace) >= len(summed(rows, kept.since)), view


def pair_of(game: Game, view: Any) -> tuple[Any, Any] | None:
    """The two batches that are to be one."""
    pairs = [(a, b) for a, b in pairwise(view.trace) if a[3] == b[3] and b[1] <= view.since]
    return pairs[0] if pairs else None


def check_requests(game: Game, player: Player, views: dict[str, Any], asked: dict[str, Any]) -> None:
    for name, view in views.items():
        wanted = pair_of(game, view) is not None and name not in player.flights
        assert (name in asked) == wanted, (name, view, asked)
        assert view.in_flight == (wanted or name in player.flights), (name, view)


def check_merged(game: Game, name: str, response: Any, before: Any, after: Any) -> None:
    """Two neighbours of one level became one; how high it is depends on what is left."""
    check_view(game, name, after)
    at = next(n for n, (a, b) in enumerate(zip(before.trace, [*after.trace, None])) if a != b)
    (old, young), merged = before.trace[at : at + 2], after.trace[at]
    rows = [row for row in game.model.streams[name].rows if old[0] <= row[2] < young[1]]
    updates = len(summed(rows, merged[2]))
    level = old[3] + (updates > old[4] and updates > young[4])
    assert merged == (old[0], young[1], merged[2], level, updates), (before, after)
    assert old[3] == young[3] and young[1] <= merged[2] <= before.since
    assert after.trace == [*before.trace[:at], merged, *before.trace[at + 2 :]]
    assert after.unsealed == before.unsealed
