"""The clock of a server that tells whole seconds."""

from email.utils import formatdate

import pytest

from aiopersist.base.runtime import Runtime
from aiopersist.storage.objects.clock import ServerClock
from aiopersist.storage.urls import open_consensus


class Turning(Runtime):
    at = 1000.0
    walls = 1_500_000_000.0
    """What the clock of the machine is ahead of the monotonic one."""

    def monotonic(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at + self.walls


def date(seconds: float) -> str:
    return formatdate(int(seconds), usegmt=True)


def test_answers_narrow_what_a_clock_may_say() -> None:
    """Goal: seconds of many answers tell the time to a few milliseconds."""
    runtime, offset, answer_s = Turning(), 1_700_000_000.4, 0.01
    clock = ServerClock(runtime)
    assert not clock.is_known and clock.error_s == 0
    for number in range(200):
        runtime.at = 1000.0 + number * 0.037
        sent = clock.sent()
        runtime.at += answer_s
        clock.answered(date(runtime.at - answer_s / 2 + offset), sent)
        assert abs(clock.now() - (runtime.at + offset)) <= clock.error_s + 1e-6
        assert clock.error_s <= 0.5 + answer_s
    assert clock.error_s < 0.03


def told(clock: ServerClock, runtime: Turning, *offsets: float) -> float:
    """What the clock says beyond ours after answers of a server that is so far beyond it."""
    for offset in offsets:
        runtime.at += 0.1
        clock.answered(date(offset + runtime.at), clock.sent())
    return clock.now() - runtime.at


START, HOUR = 1_700_000_000, 3600.0


def test_a_clock_that_was_set() -> None:
    """Goal: a great step counts once several answers in a row agree about it, in either direction."""
    runtime = Turning()
    clock = ServerClock(runtime)
    assert told(clock, runtime, *[START] * 10) == pytest.approx(START, abs=1)
    for step in (HOUR, -HOUR, 60, -60):
        assert told(clock, runtime, START + step, START + step) == pytest.approx(START, abs=1)
        assert clock.is_in_doubt
        assert told(clock, runtime, START, START + step, START + 9 * step) == pytest.approx(START, abs=1)
        assert told(clock, runtime, *[START + step] * 3) == pytest.approx(START + step, abs=1)
        assert not clock.is_in_doubt
        assert told(clock, runtime, *[START] * 3) == pytest.approx(START, abs=1)
    assert told(clock, runtime, START + 4) == pytest.approx(START + 4, abs=1)


def test_a_step_that_would_move_times_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    """Goal: it is logged once; it counts if the clock of this machine says the same."""
    runtime = Turning()
    clock = ServerClock(runtime)
    told(clock, runtime, START)
    clock.ahead_max_s = 600
    for step in (HOUR, -HOUR, 400 * 24 * HOUR):
        assert told(clock, runtime, *[START + step] * 10) == pytest.approx(START, abs=1)
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        told(clock, runtime, START)
        caplog.clear()
    runtime.walls = START + HOUR + 500
    assert told(clock, runtime, *[START + HOUR] * 3) == pytest.approx(START + HOUR, abs=1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(
    "text",
    [
        None, "", "yesterday", "Sat, 01 Jan 99999 00:00:00 GMT", "Sat, 01 Jan 9999999999999 00:00:00 GMT",
        "Mon, 01 Jan 0001 00:00:00 GMT", "Mon, 01 Jan 0001 00:00:00 -0000", "Fri, 31 Dec 9999 23:59:59 GMT",
        "Fri, 31 Dec 9999 23:59:59 -9999", "Mon, 32 Jan 2026 00:00:00 GMT", "Mon, 01 Jan 2026 99:00:00 GMT",
        "Thu, 01 Jan 1970 00:00:00 GMT",
    ],
)  # fmt: skip
def test_what_is_no_date(text: str | None) -> None:
    runtime = Turning()
    clock = ServerClock(runtime)
    clock.answered(text, clock.sent())
    assert not clock.is_known
    assert told(clock, runtime, START) == pytest.approx(START, abs=1)
    for _ in range(5):
        clock.answered(text, clock.sent())
    assert told(clock, runtime, START) == pytest.approx(START, abs=1)


async def test_the_clock_of_a_server(best_s3_url: str) -> None:
    consensus = open_consensus(best_s3_url)
    now = await consensus.now()
    assert abs(now - Runtime().wall()) < 30
    assert 0 < consensus.clock_error_s < 30
    assert await consensus.clock() > now - 30
    await consensus.aclose()
