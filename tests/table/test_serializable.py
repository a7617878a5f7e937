"""The checker of histories finds each kind of wrong history, and takes right ones for right."""

from typing import Any

import pytest

from tests.table.serializable import Op, check

X, Y = ("t", "x"), ("t", "y")
BEGIN = {X: 1, Y: 1}


def op(name: str, began: float, ended: float, time: int | None = None, **what: Any) -> Op:
    return Op(name, began, ended, time=time, **what)


WRONG = {
    "a lost update": [
        op("a", 0, 2, 10, reads={X: 1}, writes={X: 2}),
        op("b", 0, 3, 11, reads={X: 1}, writes={X: 2}),
    ],
    "a write skew": [
        op("a", 0, 2, 10, reads={X: 1, Y: 1}, writes={X: 0}),
        op("b", 0, 3, 11, reads={X: 1, Y: 1}, writes={Y: 0}),
    ],
    "a phantom": [
        op("a", 0, 2, 10, ranges=[("t", "p", "q", {})], writes={("t", "p1"): 1}),
        op("b", 0, 3, 11, ranges=[("t", "p", "q", {})], writes={("t", "p2"): 1}),
    ],
    "a torn commit": [
        op("a", 0, 2, 10, reads={X: 1, Y: 1}, writes={X: 0, Y: 2}),
        op("b", 0, 3, reads={X: 0, Y: 1}),
    ],
    "a stale get": [
        op("a", 0, 2, 10, writes={X: 2}),
        op("b", 3, 4, reads={X: 1}),
    ],
    "a get of the future": [
        op("a", 0, 1, reads={X: 2}),
        op("b", 2, 3, 10, writes={X: 2}),
    ],
    "times against the order of events": [
        op("a", 0, 1, 11, writes={X: 2}),
        op("b", 2, 3, 10, writes={Y: 2}),
    ],
    "a forgotten id": [
        op("a", 0, 1, 10, reads={X: 1}, writes={X: 2}),
        op("a again", 2, 3, 11, reads={X: 1}, writes={X: 2}),
    ],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_history_is_found(name: str) -> None:
    assert check(WRONG[name], BEGIN)


def test_right_histories_pass() -> None:
    """Goal: operations of one commit in any order, reads at any moment within their call."""
    assert (
        check(
            [
                op("b", 0, 3, 10, reads={X: 2}, writes={X: 3}),
                op("a", 0, 3, 10, reads={X: 1}, writes={X: 2}),
                op("c", 0, 9, reads={X: 2}),
                op("d", 5, 9, 12, reads={X: 3}, ranges=[("t", "x", "y", {"x": 3})], writes={X: None}),
                op("e", 9.5, 9.6, reads={X: None, Y: 1}),
            ],
            BEGIN,
        )
        == []
    )
