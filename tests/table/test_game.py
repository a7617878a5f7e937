"""Goal: whatever tasks of several clients do at once, and whatever fails, each call is told what a table with
one copy would tell, in an order that follows real time; and what was acknowledged is there (`game.py`).

A failure names its seed: `python -m tests.replay tables SEED --times 20`, since tasks and threads differ from
run to run."""

import os
from collections import Counter
from typing import Any

import pytest

from tests.conftest import QUICK
from tests.table import game
from tests.table.history import History

LONG_GAMES = int(os.environ.get("AIOPERSIST_TEST_TABLE_GAMES", "500"))
LIVELY = ("put", "put_many", "update", "insert", "delete", "get", "get_many", "stale", "as_of")


async def test_short_games() -> None:
    counts: Counter[str] = Counter()
    for seed in range(2 if QUICK else 8):
        counts += await game.play(seed)
    missing = [
        kind for kind in (*LIVELY, "both", "cancelled", "untold", "again", "maintained") if not counts[kind]
    ]
    assert not missing, (missing, counts)


@pytest.mark.long
@pytest.mark.timeout(0)
async def test_long_games() -> None:
    """`AIOPERSIST_TEST_TABLE_GAMES` says how many."""
    for seed in range(1000, 1000 + LONG_GAMES):
        await game.play(seed)


def _played(*, told: int, read: str | None) -> tuple[History, list[Any], list[Any]]:
    """Two puts of a key, one after the other, and a read behind them."""
    history = History()
    for time in (10, told):
        op = history.begin("c", "t", "put", ("a",))
        op.time = time
        history.end(op)
    op = history.begin("d", "t", "get", ("a",))
    op.result = {"a": read}
    history.end(op)
    updates = [("a", "0:a", 10, 1), ("a", "0:a", 20, -1), ("a", "1:a", 20, 1)]
    return history, updates, [("a", "1:a", 1)]


def test_the_check_accepts_what_is_right() -> None:
    history, updates, contents = _played(told=20, read="1:a")
    history.check("t", updates, contents)


@pytest.mark.parametrize(
    ("told", "read", "what"),
    [(20, "0:a", "a read of no moment"), (20, None, "a read of no moment"), (21, "1:a", "told another time")],
)
def test_the_check_finds(told: int, read: str | None, what: str) -> None:
    history, updates, contents = _played(told=told, read=read)
    with pytest.raises(AssertionError, match=what):
        history.check("t", updates, contents)


def test_the_check_finds_what_is_lost() -> None:
    """Acknowledged, and in no version; retracted, and not there; twice."""
    history, updates, contents = _played(told=20, read="1:a")
    with pytest.raises(AssertionError, match="acknowledged, and not there"):
        history.check("t", updates[:1], [("a", "0:a", 1)])
    with pytest.raises(AssertionError, match="a retraction of what is not there"):
        history.check("t", [*updates, ("a", "9:a", 30, -1)], contents)
    again = [*updates, ("a", "1:a", 30, -1), ("a", "0:a", 30, 1)]
    with pytest.raises(AssertionError, match="written twice"):
        history.check("t", again, [("a", "0:a", 1)])
