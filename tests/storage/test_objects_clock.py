"""The clock of a server that tells whole seconds."""

from email.utils import formatdate

from aiopersist.runtime import Runtime
from aiopersist.storage.objects.clock import ServerClock
from aiopersist.storage.urls import open_consensus


class Turning(Runtime):
    at = 1000.0

    def monotonic(self) -> float:
        return self.at


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


def test_a_clock_that_was_set() -> None:
    runtime = Turning()
    clock = ServerClock(runtime)
    for _ in range(10):
        runtime.at += 0.1
        clock.answered(date(1_700_000_000 + runtime.at), clock.sent())
    runtime.at += 0.1
    clock.answered(date(1_700_003_600 + runtime.at), clock.sent())
    assert abs(clock.now() - (1_700_003_600 + runtime.at)) < 1
    clock.answered(None, clock.sent())
    clock.answered("yesterday", clock.sent())
    assert abs(clock.now() - (1_700_003_600 + runtime.at)) < 1


async def test_the_clock_of_a_server(best_s3_url: str) -> None:
    consensus = open_consensus(best_s3_url)
    now = await consensus.now()
    assert abs(now - Runtime().wall()) < 30
    assert 0 < consensus.clock_error_s < 30
    assert await consensus.clock() > now - 30
    await consensus.aclose()
