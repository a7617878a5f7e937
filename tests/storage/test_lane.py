"""Goal: whatever happens to a round of jobs, each caller is told, and never of a success that was none."""

import logging
from typing import Any

import pytest

from aiopersist.errors import Indeterminate
from aiopersist.storage.lane import Lane, LaneTask


async def test_a_job_of_which_nothing_is_told_has_failed() -> None:
    lane = Lane("silent", lambda jobs: None)
    with pytest.raises(Indeterminate):
        await lane.run(lambda _: "done")
    await lane.close(lambda: None)


async def test_a_round_that_breaks_off_takes_no_success_back(caplog: pytest.LogCaptureFixture) -> None:
    def execute(jobs: list[LaneTask[Any]]) -> None:
        jobs[0].succeed("done")
        raise RuntimeError("after the commit")

    lane = Lane("breaking", execute)
    with caplog.at_level(logging.ERROR, "aiopersist"):
        assert await lane.run(lambda _: None) == "done"
    assert "broke off" in caplog.text
    await lane.close(lambda: None)


async def test_without_a_thread_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(work: object) -> None:
        raise RuntimeError("can't start new thread")

    lane = Lane("threadless", lambda jobs: [job.succeed("done") for job in jobs] and None)
    with monkeypatch.context() as patched:
        patched.setattr(lane._executor, "submit", refuse)
        with pytest.raises(RuntimeError, match="thread"):
            await lane.run(lambda _: None)
    assert await lane.run(lambda _: None) == "done"
    await lane.close(lambda: None)
