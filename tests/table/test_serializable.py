"""Goal: the checker of histories finds each kind of wrong history, and takes right ones for right."""

from collections.abc import Sequence
from typing import Any

import pytest

from tests.table.history import Found, Op, Run
from tests.table.serializable import check

X, Y, Z = ("t", "x"), ("t", "y"), ("u", "z")
BEGIN = {X: "x0", Y: "y0", Z: "z0"}


def op(name: str, began: float, ended: float, time: int | None = None, **run: Any) -> Op:
    """One that was answered. What it writes is its name, at each key; an empty val deletes."""
    writes = {key: f"{name}{val}" if val else None for key, val in run.pop("writes", {}).items()}
    ranges = tuple(Found(*found) for found in run.pop("ranges", ()))
    kind = run.pop("kind", "put")
    return Op(name, kind, began, ended, "c", [Run(run.get("reads", {}), ranges, writes)], time)


def updates(ops: Sequence[Op], without: Any = ()) -> dict[str, list[Any]]:
    """What the ops made, but for some keys at some times."""
    contents, found = dict[Any, Any](), dict[str, list[Any]]({"t": [], "u": []})
    times: dict[int, dict[Any, Any]] = {1: dict(BEGIN)}
    for one in ops:
        if one.time is not None:
            times.setdefault(one.time, {}).update(one.runs[0].writes)
    for time, writes in sorted(times.items()):
        for (table, key), val in writes.items():
            if ((table, key), time) in without:
                continue
            old = contents.pop((table, key), None)
            sides = [(old, -1)] * (old is not None) + [(val, 1)] * (val is not None)
            found[table] += [(key, side, time, diff) for side, diff in sides]
            if val is not None:
                contents[table, key] = val
    return found


def setup() -> Op:
    return Op("setup", "put", -2, -1, "c", [Run(writes=BEGIN)], 1)


WRONG = {
    "a lost update": [
        op("a", 0, 2, 10, reads={X: "x0"}, writes={X: 1}),
        op("b", 0, 3, 11, reads={X: "x0"}, writes={X: 1}),
    ],
    "a write skew": [
        op("a", 0, 2, 10, reads={X: "x0", Y: "y0"}, writes={X: 1}),
        op("b", 0, 3, 11, reads={X: "x0", Y: "y0"}, writes={Y: 1}),
    ],
    "a phantom": [
        op("a", 0, 2, 10, ranges=[("t", "p", "q", {})], writes={("t", "p1"): 1}),
        op("b", 0, 3, 11, ranges=[("t", "p", "q", {})], writes={("t", "p2"): 1}),
    ],
    "half of a commit that is read": [
        op("a", 0, 2, 10, reads={X: "x0", Z: "z0"}, writes={X: 1, Z: 2}),
        op("b", 0, 3, reads={X: "a1", Z: "z0"}),
    ],
    "a stale get": [
        op("a", 0, 2, 10, writes={X: 1}),
        op("b", 3, 4, reads={X: "x0"}),
    ],
    "a stale get of what was deleted": [
        op("a", 0, 2, 10, writes={X: ""}),
        op("b", 3, 4, reads={X: "x0"}),
    ],
    "a get that goes back": [
        op("a", 0, 9, 10, writes={X: 1}),
        op("b", 1, 2, reads={X: "a1"}),
        op("c", 3, 4, reads={X: "x0"}),
    ],
    "a get that goes back in another table": [
        op("a", 0, 9, 10, writes={X: 1, Z: 1}),
        op("b", 1, 2, reads={X: "a1"}),
        op("c", 3, 4, reads={Z: "z0"}),
    ],
    "two reads that saw two orders": [
        op("a", 0, 9, 10, writes={X: 1}),
        op("b", 0, 9, 11, writes={Z: 1}),
        op("c", 1, 5, reads={X: "a1", Z: "z0"}),
        op("d", 1, 6, reads={X: "x0", Z: "b1"}),
    ],
    "a read of what was written before a read of less": [
        op("a", 0, 9, 12, reads={Z: "z0"}, writes={X: 1}),
        op("b", 0, 9, 13, writes={Z: 1}),
        op("c", 1, 5, reads={X: "x0", Z: "b1"}),
    ],
    "a get of the future": [
        op("a", 0, 1, reads={X: "b2"}),
        op("b", 2, 3, 10, writes={X: 2}),
    ],
    "times against the order of events": [
        op("a", 0, 1, 11, writes={X: 2}),
        op("b", 2, 3, 10, writes={Y: 2}),
    ],
    "a stale get of before what the client did itself": [
        op("a", 0, 1, 10, writes={X: 1}),
        op("b", 2, 3, reads={X: "x0"}, kind="stale"),
    ],
    "a read at a time that saw another": [
        op("a", 0, 1, 10, writes={X: 1}),
        op("b", 2, 3, 9, reads={X: "a1"}, kind="as_of"),
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_history_is_found(name: str) -> None:
    assert check([setup(), *WRONG[name]], updates(WRONG[name]))


def test_what_is_there_must_be_what_was_told() -> None:
    """Goal: torn, lost, done twice, at another time, by nobody, refused."""
    a = op("a", 0, 2, 10, writes={X: 1, Z: 2})
    assert check([setup(), a], updates([a])) == []
    assert check([setup(), a], updates([a], without=[(Z, 10)]))
    assert check([setup(), a], updates([]))
    assert check([setup(), a], updates([op("a", 0, 2, 11, writes={X: 1, Z: 2})]))
    assert check([setup()], updates([a]))
    between, again = op("b", 3, 4, 11, writes={X: 1}), op("a", 0, 2, 12, writes={X: 1})
    assert check([setup(), a, between], updates([a, between, again]))
    a.refusals = a.calls = 1
    assert check([setup(), a], updates([a]))


def test_what_was_not_answered_is_there_or_not() -> None:
    """Goal: it explains what is there, by a val or by the lack of one; half of it explains nothing."""
    a, b = op("a", 0, 2, 10, writes={X: 1, Z: 2}), op("b", 3, 4, 11, writes={X: ""})
    wrote = updates([a, b])
    half = updates([a], without=[(Z, 10)])
    for one in (a, b):
        one.ended, one.time, one.client = float("inf"), None, ""
    assert check([setup(), a, b], wrote) == []
    assert check([setup(), a, b], updates([])) == []
    assert check([setup(), a], half)
    assert check([setup(), a], wrote)


def test_right_histories_pass() -> None:
    """Goal: operations of one commit in any order, reads at any moment within their call, deletes of what is
    not there."""
    ops = [
        op("a", 0, 3, 10, reads={X: "x0"}, writes={X: 1}),
        op("b", 0, 3, 10, reads={X: "a1"}, writes={X: 1}),
        op("c", 0, 9, reads={X: "b1"}),
        op("d", 5, 9, 12, reads={X: "b1"}, ranges=[("t", "x", "y", {"x": "b1"})], writes={X: ""}),
        op("e", 9.5, 9.6, reads={X: None, Y: "y0"}),
        op("f", 9.5, 9.6, reads={X: None, Z: "z0"}),
        op("g", 9.7, 9.8, 12, writes={X: ""}),
        op("h", 9.5, 9.6, 11, reads={X: "b1"}, kind="as_of"),
        op("i", 5.5, 5.6, reads={X: "b1", Y: "y0"}, kind="stale"),
    ]
    assert check([setup(), *reversed(ops)], updates(ops)) == []


def test_what_was_replaced_within_its_commit_is_right_beside_what_changed_nothing() -> None:
    """Goal: who changes nothing later is told the time of what it saw, which is that of the commit."""
    b, c = op("b", 0, 2, 10, writes={X: 1}), op("c", 3, 4, 10, writes={("t", "n"): ""})
    replaced = op("a", 0, 2, reads={X: "x0"}, writes={X: 1}, kind="update")
    assert check([setup(), replaced, b, c], updates([b, c])) == []
    writer = op("d", 3, 4, 10, writes={Y: 1})
    assert check([setup(), replaced, b, writer], updates([b, writer]))


def test_what_failed_may_have_been_within_a_commit() -> None:
    """Goal: what an insert found may be what another of its commit put, and a third one deleted."""
    a, b = op("a", 0, 2, 10, writes={("t", "n"): 1, X: 1}), op("b", 0, 2, 10, writes={("t", "n"): ""})
    found = op("c", 0, 2, reads={("t", "n"): "*"}, kind="insert")
    assert check([setup(), a, b, found], updates([a, b])) == []
    nothing = op("e", 3, 4, 10, writes={("t", "n"): ""})  # told the time of what it saw
    assert check([setup(), a, b, found, nothing], updates([a, b])) == []
    later = op("d", 3, 4, reads={("t", "n"): "*"}, kind="insert")
    assert check([setup(), a, b, later], updates([a, b]))


def test_clocks_of_clients_that_share_no_table_may_differ() -> None:
    """Goal: times in the other order than events are right there, as long as nobody sees another order."""
    a, b = op("a", 0, 1, 11, writes={X: 1}), op("b", 2, 3, 10, writes={Z: 1})
    assert check([setup(), a, b], updates([a, b])) == []
    seen = op("c", 0, 9, reads={X: "x0", Z: "b1"})
    assert check([setup(), a, b, seen], updates([a, b]))
