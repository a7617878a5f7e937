"""Goal: since moves exactly as far as the critical readers and the policy of a shard allow, and what a later
state proves about their commands is never more than it can."""

from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.frontier import Antichain
from aiopersist.state.command import AHEAD_S, Commit, Keep
from aiopersist.state.model import Clock, CriticalReader, Mark, Retention, State
from aiopersist.state.reading import RegisterReader, RenewReader
from aiopersist.state.retention import (
    ApplyRetention,
    DowngradeCritical,
    ForgetHistory,
    RegisterCritical,
    ReleaseCritical,
    SetRetention,
)
from tests.state.commands_kit import LEASE_S, History, created
from tests.state.values import ZERO


def appended(upper: int | None, history: History | None = None) -> History:
    """A shard with that upper (`None`: the empty one) and no batches."""
    history = history or created()
    history.state = history.read = history.live.replace(upper=at(upper))
    return history


def at(time: int | None) -> Antichain:
    return Antichain() if time is None else Antichain(time)


# --- critical readers ---------------------------------------------------------------------------------


def critical(opaque: int, since: int) -> CriticalReader:
    return CriticalReader(since=at(since), opaque=opaque)


def test_a_critical_reader_is_taken_as_it_is() -> None:
    """Goal: the second process to register it learns where it stands, and changes nothing."""
    history = appended(9)
    made = history.run(RegisterCritical("c", 1))
    assert isinstance(made, Commit) and made.result == critical(1, 0)
    history.run(DowngradeCritical("c", 1, 2, at(4)))
    assert history.run(RegisterCritical("c", 7)) == Keep(result=critical(2, 4))
    assert history.live.critical == {"c": critical(2, 4)}
    later = history.run(RegisterCritical("d", 0))
    assert isinstance(later, Commit) and later.result == critical(0, 4)  # it begins at the shard's since


@pytest.mark.parametrize(("known", "expected"), [(3, 2), (None, 2)])
@pytest.mark.parametrize("command", [DowngradeCritical("c", 2, 5, at(4)), ReleaseCritical("c", 2)], ids=type)
def test_another_owner_is_refused(command: Any, known: int | None, expected: int) -> None:
    history = created()
    if known is not None:
        history.run(RegisterCritical("c", known))
    outcome = history.run(command)
    assert isinstance(outcome, Keep)
    assert isinstance(outcome.error, ap.OpaqueMismatch)
    assert (outcome.error.expected, outcome.error.actual) == (expected, known)


def test_a_downgrade_moves_the_hold_and_since() -> None:
    """Goal: the hold never goes back; since follows the least hold."""
    history = created()
    history.run(RegisterCritical("c", 1))
    history.run(RegisterReader("r", at(5), LEASE_S))
    outcome = history.run(DowngradeCritical("c", 1, 2, at(4)))
    assert isinstance(outcome, Commit) and outcome.result == critical(2, 4)
    assert (history.live.critical["c"], history.live.since) == (critical(2, 4), at(4))
    history.run(DowngradeCritical("c", 2, 2, at(3)))
    assert (history.live.critical["c"], history.live.since) == (critical(2, 4), at(4))
    history.run(DowngradeCritical("c", 2, 2, at(9)))
    assert (history.live.critical["c"], history.live.since) == (critical(2, 9), at(5))


def test_a_critical_reader_that_is_released_holds_nothing() -> None:
    history = created()
    history.run(RegisterCritical("c", 1))
    history.run(RegisterReader("r", ZERO, LEASE_S))
    history.run(RenewReader("r", advance_to=at(6)))
    assert history.live.since == ZERO
    assert isinstance(history.run(ReleaseCritical("c", 1)), Commit)
    assert (history.live.critical, history.live.since) == ({}, ZERO)
    history.run(RenewReader("r"))
    assert history.live.since == at(6)


def having(**critical_readers: CriticalReader) -> State:
    return created().live.replace(critical=critical_readers)


@pytest.mark.parametrize(
    ("found", "proved"),
    [
        pytest.param(critical(2, 4), True, id="there"),
        pytest.param(critical(2, 9), True, id="its owner went on"),
        pytest.param(critical(2, 3), None, id="the same opaque at an earlier time"),
        pytest.param(critical(1, 4), None, id="not yet"),
        pytest.param(critical(3, 9), None, id="another owner"),
        pytest.param(None, None, id="released"),
    ],
)
def test_what_proves_a_downgrade(found: CriticalReader | None, proved: bool | None) -> None:
    """Goal: only its own opaque, and only if that is a new one, at its time or later."""
    state = having(**({} if found is None else {"c": found}))
    assert DowngradeCritical("c", 1, 2, at(4)).happened(state) is proved
    assert DowngradeCritical("c", 2, 2, at(4)).happened(state) is None


def test_what_proves_a_registration_and_a_release() -> None:
    there, gone = having(c=critical(1, 0)), having()
    assert RegisterCritical("c", 1).happened(there) is True
    assert RegisterCritical("c", 1).happened(gone) is None  # it may have been released since
    assert ReleaseCritical("c", 1).happened(gone) is True
    assert ReleaseCritical("c", 1).happened(there) is None  # it may have been registered anew


# --- policies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "upper", "exact", "since"),
    [
        pytest.param(4, 10, True, 6, id="exactly so many times are kept"),
        pytest.param(16, 18, False, 0, id="an eighth too many is not worth a version"),
        pytest.param(16, 19, False, 3, id="more than an eighth too many is"),
        pytest.param(4, 5, True, 1, id="one too many, if an exact move is asked for"),
        pytest.param(4, 4, True, 0, id="no more than to keep"),
        pytest.param(1, 10, True, 9, id="the last complete time"),
        pytest.param(0, 10, True, 9, id="the last complete time stays readable, whatever is asked"),
        pytest.param(0, 0, True, 0, id="nothing was appended"),
        pytest.param(4, None, True, 0, id="a finished shard"),
    ],
)
def test_how_far_a_number_of_times_moves_since(
    times: int, upper: int | None, exact: bool, since: int
) -> None:
    history = created()
    history.run(SetRetention(times, None))
    appended(upper, history)
    outcome = history.run(ApplyRetention(exact))
    assert isinstance(outcome, Commit) is (since > 0)
    assert (history.live.since, history.live.retention[0].hold) == (at(since), at(since))


def test_since_catches_up_when_another_hold_ends() -> None:
    """Goal: also if the policy itself has nothing to move."""
    history = created()
    history.run(SetRetention(4, None))
    history.run(RegisterReader("r", at(2), LEASE_S))
    appended(10, history).run(ApplyRetention(True))
    assert (history.live.since, history.live.retention[0].hold) == (at(2), at(6))
    assert history.run(ApplyRetention(True)) == Keep()
    history.now += LEASE_S + 1  # the reader is overdue, and goes with the next commit
    assert isinstance(history.run(ApplyRetention(True)), Commit)
    assert (history.live.since, history.live.readers) == (at(6), {})


@pytest.mark.parametrize("policy", [True, False])
@pytest.mark.parametrize(("asked", "since"), [(3, 3), (9, 7), (12, 7)])
def test_history_is_given_up_once(policy: bool, asked: int, since: int) -> None:
    """Goal: as far as the other holds allow, and never beyond the last complete time; the policy stays, and
    without one no more is given up."""
    history = created()
    if policy:
        history.run(SetRetention(100, None))
    history.run(RegisterReader("r", at(7), LEASE_S))
    appended(10, history)
    outcome = history.run(ForgetHistory(at(asked)))
    assert isinstance(outcome, Commit) and outcome.result == history.live.since == at(since)
    assert history.run(ForgetHistory(at(asked))) == Keep(result=at(since))
    history.now += LEASE_S + 1  # the reader is overdue
    history.run(ForgetHistory(at(asked)))
    assert history.live.since == at(min(asked, 9))
    assert {(r.times, r.hold) for r in history.live.retention.values()} <= {(100, at(min(asked, 9)))}


def marked(seconds: float, *marks: tuple[float, int], upper: int, now: float) -> History:
    """A shard whose policy remembers these uppers."""
    history = appended(upper)
    record = Retention(
        seconds=seconds, hold=ZERO, marks=tuple(Mark(at=when, upper=at(was)) for when, was in marks)
    )
    history.state = history.read = history.live.replace(retention={0: record})
    history.now = now
    return history


@pytest.mark.parametrize(
    ("marks", "upper", "now", "since", "left"),
    [
        pytest.param([(100, 3)], 9, 107.9, 0, [(100, 3), (107.9, 9)], id="younger than the seconds"),
        pytest.param([(100, 3)], 9, 108.0, 3, [(100, 3), (108, 9)], id="as old as the seconds"),
        pytest.param([(90, 2), (100, 3)], 9, 108.0, 3, [(100, 3), (108, 9)], id="older marks are forgotten"),
        pytest.param([(100, 3)], 9, 101.9, 0, [(100, 3)], id="the next mark is not due"),
        pytest.param([(100, 3)], 9, 102.0, 0, [(100, 3), (102, 9)], id="the next mark is due"),
        pytest.param([(100, 9)], 9, 120.0, 8, [(100, 9)], id="the last complete time stays readable"),
        pytest.param([(100, 3)], 9, 100 - AHEAD_S - 0.5, 0, [(98.5, 3)], id="a mark in the future"),
        pytest.param([(100, 3)], 9, 100 - AHEAD_S, 0, [(100, 3)], id="a mark of another process's clock"),
    ],
)
def test_how_far_seconds_move_since(
    marks: list[tuple[float, int]], upper: int, now: float, since: int, left: list[tuple[float, int]]
) -> None:
    """Goal: since moves to the upper that the shard had 8 seconds ago; four marks are made in that time."""
    history = marked(8.0, *marks, upper=upper, now=now)
    history.run(ApplyRetention(True))
    assert history.live.since == at(since)
    assert [(mark.at, mark.upper.time) for mark in history.live.retention[0].marks] == left


@pytest.mark.parametrize(
    ("policy", "micros", "exact", "since"),
    [
        pytest.param(
            SetRetention(None, 8.0), 9_000_000, False, 0, id="an eighth too many is not worth a version"
        ),
        pytest.param(SetRetention(None, 8.0), 9_250_000, False, 1_250_000, id="more than an eighth is"),
        pytest.param(SetRetention(None, 8.0), 8_500_000, True, 500_000, id="exactly the seconds"),
        pytest.param(SetRetention(5, None), 9_000_000, True, 8_999_995, id="a time is a microsecond"),
    ],
)
def test_how_far_a_wall_clock_moves_since(policy: SetRetention, micros: int, exact: bool, since: int) -> None:
    history = created()
    history.state = history.read = history.live.replace(clock=Clock.WALL)
    appended(micros, history).run(policy)
    history.now = micros / 1_000_000
    history.run(ApplyRetention(exact))
    assert history.live.since == at(since)


def test_a_policy_begins_at_since_and_goes_on() -> None:
    history = created()
    assert history.run(SetRetention(None, None)) == Keep()
    history.run(RegisterCritical("c", 1))
    history.run(DowngradeCritical("c", 1, 2, at(3)))
    appended(9, history).run(SetRetention(None, 5.0))
    made = Retention(seconds=5.0, hold=at(3), marks=(Mark(at=history.now, upper=at(9)),))
    assert history.live.retention == {0: made}
    assert history.run(SetRetention(None, 5.0)) == Keep()
    history.now += 1.0
    appended(12, history).run(SetRetention(2, None))
    assert history.live.retention == {0: made.replace(times=2, seconds=None)}
    assert isinstance(history.run(SetRetention(None, None)), Commit)
    assert history.live.retention == {}


def test_a_number_of_times_is_refused_where_times_are_tuples() -> None:
    state = created().live.replace(since=Antichain((0, 0)), upper=Antichain((4, 4)))
    history = History(state=state, read=state)
    refused = history.run(SetRetention(5, None))
    assert isinstance(refused, Keep) and isinstance(refused.error, ap.InvalidUsage)
    assert refused.error.kind is ap.UsageKind.INVALID_TIME
    assert isinstance(history.run(SetRetention(None, 5.0)), Commit)


@pytest.mark.parametrize("times", [0, 3])
def test_a_policy_of_a_shard_whose_since_is_empty(times: int) -> None:
    """Goal: it moves nothing, and hinders no other command."""
    history = created()
    history.run(RegisterReader("r1", ZERO, LEASE_S))
    history.run(RenewReader("r1", advance_to=Antichain()))
    history.run(SetRetention(times, None))
    assert history.live.since == Antichain()
    for exact in (False, True):
        history.run(ApplyRetention(exact))
        assert history.live.since == Antichain()
