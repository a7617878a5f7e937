"""The demo by author date verifies itself, and can tell when it should fail: it runs as a command."""

import asyncio
import os
import re
import subprocess
from pathlib import Path
from shutil import copytree

import pytest

import aiopersist as ap
from aiopersist.demo.git import FileVersion, Repository
from aiopersist.demo.indexed import Walk
from tests.cli.test_demo import git, here, one_line
from tests.support.location import ON_SERVERS

DATES = [500, 300, 400, 400, 900, 100, 800, 850]
LATE = 6


def commit(folder: Path, date: int, message: str) -> None:
    git(folder, "add", "-A")
    who = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = os.environ | who | {"GIT_AUTHOR_DATE": f"@{date} +0000", "GIT_CONFIG_GLOBAL": os.devnull}
    command = ["git", "-C", folder, "commit", "-q", "--allow-empty", "-m", message]
    subprocess.run(command, env=env, capture_output=True, check=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files in two folders and in none, which come, change and go, authored early and late. Who adds to them
    takes a copy."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "a").mkdir(parents=True)
    (folder / "b" / "deep").mkdir(parents=True)
    git(folder, "init", "-q", "-b", "main")
    for n, date in enumerate(DATES):
        (folder / "root").write_text(str(n))
        (folder / ("a" if n % 2 else "b") / f"file-{n}").write_text("x" * n)
        (folder / "b" / "deep" / "always").write_text(str(n // 2))
        if n > 3:
            (folder / ("a" if n % 2 else "b") / f"file-{n - 2}").unlink()
        commit(folder, date, str(n))
    return folder


def test_it_stores_follows_and_checks(repository: Path) -> None:
    result = here("--indexed", cwd=repository)
    assert (result.status, result.err) == (0, "")
    assert f"{len(DATES)} commits in" in result.out
    assert re.search(rf"[\d,]+ rows in 3 streams; {LATE} commits were late", result.out)
    assert re.search(r"\d times \(\d+ rows\) and the subscriber's contents equal git's", result.out)


@pytest.mark.slow
def test_a_location_is_kept_and_gone_on_with(repository: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    first = here(repository, "--indexed", "--location", kept, "--limit", 3)
    assert (first.status, first.err) == (0, "")
    assert "3 commits in" in first.out
    second = here(repository, "--indexed", "--location", kept)
    assert (second.status, second.err) == (0, "")
    assert f"{len(DATES) - 3} commits in" in second.out
    again = here(repository, "--indexed", "--location", kept, "--limit", 2)
    assert (again.status, again.err) == (0, "")
    assert "0 commits in" in again.out


@pytest.mark.slow
def test_a_history_without_files(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path, 5, "nothing")
    result = here("--indexed", cwd=tmp_path)
    assert (result.status, result.err) == (0, "")
    assert "0 rows in 0 streams" in result.out


@ON_SERVERS
@pytest.mark.slow
def test_it_runs_on_every_location(repository: Path, location: tuple[str, str]) -> None:
    blob, consensus = location
    result = here(repository, "--indexed", "--blob", blob, "--consensus", consensus)
    assert (result.status, result.err) == (0, "")
    assert "equal git's" in result.out


@pytest.mark.slow
def test_a_commit_that_is_older_than_what_is_sealed_is_refused(repository: Path, tmp_path: Path) -> None:
    repository = copytree(repository, tmp_path / "repository")
    kept = tmp_path / "kept"
    assert here(repository, "--indexed", "--location", kept).status == 0
    (repository / "root").write_text("late")
    commit(repository, 850, "too late")
    result = here(repository, "--indexed", "--location", kept)
    assert result.status == 1
    assert re.search(r"refused: time 850 is before \{901\} of stream 'commits'", one_line(result))


@pytest.mark.slow
async def test_a_wrong_row_is_found(repository: Path, tmp_path: Path) -> None:
    commits = await (await Repository.find(repository)).first_parents()
    async with ap.open(tmp_path / "kept") as client, client.indexed(f"git-{commits[0]}") as ix:
        stream = await ix.register("a/", bytes, FileVersion)
        wrong = FileVersion(mode=0o100644, blob=b"\0" * 20, size=1)
        await ix.write([(stream, [(b"a/no-such-file", wrong, 850, 1)])])
    result = await asyncio.to_thread(here, repository, "--indexed", "--location", tmp_path / "kept")
    assert result.status == 1
    assert "differs from git at" in one_line(result)


def test_what_a_walk_proves() -> None:
    """Goal: after each commit all later ones are at or beyond what is complete, also those beyond a limit."""
    commits = [str(n) for n in range(len(DATES))]
    dates = dict(zip(commits, DATES, strict=True))
    walk = Walk(commits, dates, 4)
    assert walk.complete == [100, 100, 100, 100, 100, 800, 850, 901]
    assert (walk.commits, walk.end) == (commits[:4], 100)
    assert Walk(commits, dates, None).late == LATE
    assert Walk(commits, dates, None).runs_until(400) == [(1, 3), (5, 5)]
    assert Walk(commits, dates, None).runs_until(900) == [(0, 7)]
