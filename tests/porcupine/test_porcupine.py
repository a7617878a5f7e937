"""Goal: our own checkers are not the only judges. Porcupine takes for right what they take for right, and
refuses wrong ones: histories by hand, histories with one read changed, games with a planted bug.

`python -m tests.porcupine.test_porcupine` plays brief games with each bug of `tests/worlds/planted`, or with
those that it is told, and prints how many it took until our checkers, and until Porcupine, saw the bug."""

import logging
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.conftest import QUICK
from tests.porcupine.histories import EARLIER, HISTORIES, built, lines, refused
from tests.support.virtual import played
from tests.table import game, serializable, test_planted, verdict
from tests.table.history import Op, Run
from tests.table.test_serializable import WRONG, X, Y, Z, op, setup, updates
from tests.table.versions import Updates
from tests.worlds.everything import MORE_FROM, PLAYERS, play
from tests.worlds.planted.search import BUGS, roles_of

pytestmark = pytest.mark.slow
GAMES, WORLDS = (4, 2) if QUICK else (8, 4)
MANY = int(os.environ.get("AIOPERSIST_TEST_JUDGED", "2000"))
INVISIBLE = {
    "times against the order of events": "commit times are not in the file",
    "a stale get of before what the client did itself": "nor are reads that may be stale",
    "a read at a time that saw another": "nor reads at a time",
}
QUICKLY = (test_planted.a_write_skew, test_planted.a_phantom, test_planted.a_stale_get)
PLANTED = [pytest.param(bug, marks=() if bug in QUICKLY else pytest.mark.long) for bug in test_planted.BUGS]
IN_COMMITS = (
    "a_version_is_never_ours",
    "a_statement_for_each_shard",
    "an_append_that_came_late_is_told_as_done",
    "an_append_without_an_answer_begins_anew",
)
INF = float("inf")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("judge"))


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the games write their histories."""
    monkeypatch.setenv(HISTORIES, str(tmp_path / "histories"))
    return tmp_path / "histories"


def judged(judge: Path, file: Path, histories: dict[str, tuple[Sequence[Op], Updates]]) -> set[str]:
    """Those that are refused."""
    texts = (line for name, (ops, end) in histories.items() for line in lines(name, ops, end))
    file.write_text("\n".join(texts))
    return set(refused(judge, file))


# --- by hand ------------------------------------------------------------------------------------------


def test_wrong_histories_are_refused(judge: Path, file: Path) -> None:
    histories = {name: ([setup(), *ops], updates(ops)) for name, ops in WRONG.items()}
    assert judged(judge, file, histories) == WRONG.keys() - INVISIBLE.keys()


def untold(one: Op) -> Op:
    one.ended, one.time = INF, None
    return one


def right() -> Iterator[tuple[str, list[Op], Updates]]:
    """Histories that are nearly wrong: name, operations, and what is there."""
    a, b = op("a", 0, 3, 10, writes={X: 1}), op("b", 2, 4, reads={X: "x0"})
    yield "a get beside a put", [a, b], updates([a])
    a = op("a", 0, 2, 10, reads={X: "x0", Y: "y0"}, writes={X: 1})
    b = op("b", 0, 3, 11, reads={X: "a1", Y: "y0"}, writes={Y: 1})
    yield "a write skew that was seen", [a, b], updates([a, b])
    a, b = op("a", 0, 1, 10, writes={X: 1}), op("b", 0, 9, 11, writes={Z: 1})
    c, d = op("c", 2, 3, reads={X: "a1", Z: "z0"}), op("d", 4, 5, reads={X: "a1", Z: "b1"})
    yield "reads that saw one order", [a, b, c, d], updates([a, b])
    a = untold(op("a", 0, 1, reads={X: None}, writes={X: 1}))
    yield "an insert that was not told, and can never have happened", [a], updates([])
    a, b = op("a", 0, 1, 10, writes={X: 1}), op("b", 5, 6, reads={X: "x0"})
    end = updates([a])
    yield "what was not told, and never happened", [untold(a), b], updates([])
    yield "what was not told, and happened later", [a, b, op("c", 7, 8, reads={X: "a1"})], end


def test_right_histories_are_not_refused(judge: Path, file: Path) -> None:
    histories = {name: ([setup(), *ops], end) for name, ops, end in right()}
    assert judged(judge, file, histories) == set()


def test_what_was_not_told_happened_once_at_most(judge: Path, file: Path) -> None:
    *_, (name, ops, end) = right()
    back = op("d", 9, 10, reads={X: "x0"})
    assert judged(judge, file, {name: ([setup(), *ops, back], end)}) == {name}


# --- games --------------------------------------------------------------------------------------------


def worlds() -> Iterator[int]:
    """Those in which calls on tables are made at random."""
    return (seed for seed in range(MORE_FROM, 1000 * MORE_FROM) if {*PLAYERS} <= roles_of(seed))


def test_games_are_right(judge: Path, file: Path) -> None:
    for seed in range(GAMES):
        game.play_brief(seed)
    for seed in islice(worlds(), WORLDS):
        play(seed)
    assert file.exists()
    assert refused(judge, file) == {}


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_games_are_right(judge: Path, file: Path) -> None:
    """`AIOPERSIST_TEST_JUDGED` says how many, and how many worlds."""
    for seed in range(20_000, 20_000 + MANY):
        game.play_brief(seed)
    for seed in islice(worlds(), MANY):
        play(seed)
    assert refused(judge, file) == {}


def changed(ops: Sequence[Op], dice: random.Random) -> list[Op] | None:
    """The history, but one call was told another val, or none, which some call has written."""
    vals: dict[Any, list[Any]] = {}
    for key, val in ((key, val) for one in ops for run in one.runs for key, val in run.writes.items()):
        vals.setdefault(key, [None]).append(val)
    able = [one for one in ops if one.answered and one.kind not in EARLIER and len(one.runs) == 1]
    reads = [(one, key) for one in able for key in one.runs[0].reads if key in vals]
    if not reads:
        return None
    chosen, key = dice.choice(reads)
    (run,) = chosen.runs
    other = Run({**run.reads, key: dice.choice(vals[key])}, run.ranges, run.writes)
    return [replace(one, runs=[other]) if one is chosen else one for one in ops]


def compared(judge: Path, file: Path, monkeypatch: pytest.MonkeyPatch, seeds: range, each: int) -> int:
    """Change a read of these games. How many histories both refuse; Porcupine alone refuses none."""
    histories: dict[str, Any] = {}
    check = serializable.check

    def kept(ops: Sequence[Op], end: Updates) -> list[str]:
        dice = random.Random(len(histories))
        for number in range(each):
            if (other := changed(ops, dice)) is not None:
                histories[f"{len(histories)} {number}"] = other, end
        return check(ops, end)

    monkeypatch.setattr(verdict, "check", kept)
    for seed in seeds:
        game.play_brief(seed)
    theirs = judged(judge, file, histories)
    ours = {name for name, history in histories.items() if check(*history)}
    print(f"{len(histories)} changed, {len(ours)} refused by ours, {len(theirs)} by Porcupine")
    assert theirs <= ours, theirs - ours
    return len(theirs)


def test_what_it_refuses_we_refuse(judge: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(judge, file, monkeypatch, range(GAMES), 20) > GAMES


@pytest.mark.long
@pytest.mark.timeout(0)
def test_what_it_refuses_we_refuse_in_many_games(
    judge: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compared(judge, file, monkeypatch, range(30_000, 30_000 + MANY), 5) > MANY


# --- planted bugs -------------------------------------------------------------------------------------


def search(judge: Path, file: Path, plays: Iterator[Callable[[], Any]]) -> tuple[int | None, int | None, str]:
    """After how many of them ours, and Porcupine, saw it; and what Porcupine said."""
    ours: int | None = None
    for number, one in enumerate(plays, 1):
        file.unlink(missing_ok=True)
        try:
            one()
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            ours = ours or number
        if file.exists() and (faults := refused(judge, file)):
            return ours, number, str(faults)
    return ours, None, ""


def games(bug: Callable[..., Any]) -> Iterator[Callable[[], Any]]:
    rates = test_planted.SPECIAL.get(bug, test_planted.RATES)
    for seed in range(test_planted.SEEDS):
        planted = game.Game(seed, rates, calm=True, size=test_planted.SIZE)
        yield partial(played, seed, planted.play)


def brief_games() -> Iterator[Callable[[], Any]]:
    return (partial(game.play_brief, seed) for seed in range(test_planted.SEEDS))


@pytest.mark.parametrize("bug", PLANTED, ids=lambda bug: bug.__name__)
def test_it_sees_what_is_planted(
    bug: Callable[..., Any], judge: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug(monkeypatch)
    _, theirs, said = search(judge, file, games(bug))
    assert theirs is not None
    print(theirs, said[:600])


@pytest.mark.long
@pytest.mark.parametrize("name", IN_COMMITS)
def test_it_sees_what_is_planted_in_commits(
    name: str, judge: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    BUGS[name].plant(monkeypatch)
    _, theirs, said = search(judge, file, brief_games())
    assert theirs is not None
    print(theirs, said[:600])


def main(names: list[str]) -> None:
    logging.disable(logging.CRITICAL)
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        judge, file = built(Path(folder)), Path(folder, "histories")
        patch.setenv(HISTORIES, str(file))
        for name in names or BUGS:
            with pytest.MonkeyPatch.context() as planted:
                BUGS[name].plant(planted)
                print(f"| {name} | {search(judge, file, brief_games())} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
