"""Goal: after any failure in a group of jobs, each caller gets the outcome of its job, and never a false
success."""

import logging
from typing import Any

import pytest

from aiopersist.base.errors import Indeterminate
from aiopersist.storage.sqlite.worker import ThreadJob, WorkerThread


async def test_a_job_that_is_not_settled_has_failed() -> None:
    thread = WorkerThread("silent", lambda jobs: None)
    with pytest.raises(Indeterminate):
        await thread.run(lambda _: "done")
    await thread.close(lambda: None)


async def test_a_group_that_breaks_off_takes_no_success_back(caplog: pytest.LogCaptureFixture) -> None:
    def execute(jobs: list[ThreadJob[Any]]) -> None:
        jobs[0].succeed("done")
        raise RuntimeError("after the commit")

    thread = WorkerThread("breaking", execute)
    with caplog.at_level(logging.ERROR, "aiopersist"):
        assert await thread.run(lambda _: None) == "done"
    assert "broke off" in caplog.text
    await thread.close(lambda: None)


async def test_without_a_thread_no_caller_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    thread = WorkerThread("threadless", lambda jobs: [job.succeed("done") for job in jobs] and None)
    with monkeypatch.context() as patched:
        patched.setattr(thread._executor, "submit", refuse)
        patched.setattr("threading.Thread.start", refuse)
        with pytest.raises(RuntimeError, match="thread"):
            await thread.run(lambda _: None)
    assert await thread.run(lambda _: None) == "done"
    await thread.close(lambda: None)
