"""The demo verifies itself, and can tell when it should fail: it runs as a command, on real stores."""

import asyncio
import os
import re
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest
from typer.testing import CliRunner

import aiopersist as ap
from aiopersist.cli.app import app
from aiopersist.demo.git import FileVersion, Repository
from aiopersist.testing.servers import free_port
from tests.cli.result import Result
from tests.support.location import ON_SERVERS

COMMITS = 9


def git(folder: Path, *arguments: str) -> None:
    who = {f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    env = os.environ | who | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    subprocess.run(["git", "-C", folder, *arguments], env=env, capture_output=True, check=True)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that come, change, and go; the tests of this module only read them."""
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "-q", "-b", "main")
    for n in range(COMMITS):
        (folder / f"file-{n}").write_text("x" * n)
        (folder / "always").write_text(str(n))
        if n > 2:
            (folder / f"file-{n - 2}").unlink()
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", str(n))
    return folder


def demo(*arguments: object, cwd: Path | None = None, **env: str) -> Result:
    run = subprocess.run(
        [sys.executable, "-c", "from aiopersist.cli import main; main()", "demo", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | env,
    )
    return Result(run.returncode, run.stdout, run.stderr)


def here(*arguments: object, cwd: Path | None = None, **env: str) -> Result:
    """The same in this process."""
    with chdir(cwd or "."):
        done = CliRunner().invoke(app, ["demo", *map(str, arguments)], env=env)
    return Result(done.exit_code, done.stdout, done.stderr)


def one_line(result: Result) -> str:
    """The only thing that was said."""
    assert result.err.count("\n") == 1, result.err
    assert result.err.startswith("aiopersist: ")
    return result.err


def test_it_stores_follows_and_checks_the_repository_it_is_in(repository: Path) -> None:
    result = demo(cwd=repository)
    assert (result.status, result.err) == (0, "")
    assert f"{COMMITS} commits in" in result.out
    assert re.search(r"commits/s; 32 rows, [\d,]+ bytes", result.out)
    assert re.search(r"from append to subscriber: p50 [\d.]+ ms, p99 [\d.]+ ms", result.out)
    assert f"{COMMITS} snapshots (33 rows) and the subscriber's contents equal git's" in result.out
    wins = [int(n) for n in re.findall(r"won (\d+)", result.out)]
    assert sum(wins) == COMMITS


@ON_SERVERS
@pytest.mark.slow
def test_it_runs_on_every_location(repository: Path, location: tuple[str, str]) -> None:
    blob, consensus = location
    result = here(repository, "--blob", blob, "--consensus", consensus)
    assert (result.status, result.err) == (0, "")
    assert "equal git's" in result.out


@pytest.mark.slow
def test_a_location_is_kept_and_gone_on_with(repository: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    first = here(repository, "--location", kept, "--limit", 3)
    assert (first.status, first.err) == (0, "")
    assert "3 commits in" in first.out
    assert list(kept.iterdir())
    second = here(repository, "--location", kept)
    assert (second.status, second.err) == (0, "")
    assert f"{COMMITS - 3} commits in" in second.out
    again = here(repository, "--location", kept, "--limit", 5)
    assert (again.status, again.err) == (0, "")
    assert "0 commits in" in again.out
    assert "equal git's" in again.out


async def test_a_wrong_row_in_the_middle_is_found(repository: Path, tmp_path: Path) -> None:
    """Somebody else wrote the first commit, and not as git has it."""
    commits = await (await Repository.find(repository)).first_parents()
    async with (
        ap.open(tmp_path / "kept") as client,
        client.writer(f"git-{commits[0]}", ap.Schema(key=bytes, val=FileVersion)) as w,
    ):
        wrong = FileVersion(mode=0o100644, blob=b"\0" * 20, size=1)
        await w.compare_and_append([(b"no-such-file", wrong, 0, 1)], 0, 1)
    result = await asyncio.to_thread(here, repository, "--location", tmp_path / "kept")
    assert result.status == 1
    assert "differs from git at" in one_line(result)


def test_no_repository(tmp_path: Path) -> None:
    result = here(cwd=tmp_path, GIT_CEILING_DIRECTORIES=str(tmp_path.parent))
    assert result.status == 2
    assert "not a git repository" in one_line(result)


def test_no_git(repository: Path, tmp_path: Path) -> None:
    result = here(repository, PATH=str(tmp_path / "nothing"))
    assert result.status == 2
    assert "no git on the PATH" in one_line(result)


def test_no_commit(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    result = here(tmp_path)
    assert result.status == 2
    assert "no commit yet" in one_line(result)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(["--blob", "mem://"], "need each other", id="only one store"),
        pytest.param(
            ["--location", "x", "--blob", "mem://", "--consensus", "mem://"],
            "cannot be combined",
            id="two locations",
        ),
        pytest.param(["--blob", "nonsense://x", "--consensus", "mem://"], "nonsense", id="an unknown scheme"),
    ],
)
def test_wrong_options(repository: Path, options: list[str], said: str) -> None:
    result = here(repository, *options)
    assert result.status == 2
    assert said in one_line(result)


def test_a_location_that_is_a_file(repository: Path) -> None:
    result = here(repository, "--location", repository / "always")
    assert result.status == 2
    one_line(result)


def test_an_unreachable_store(repository: Path, tmp_path: Path) -> None:
    consensus = f"postgres://nobody@127.0.0.1:{free_port()}/nothing"
    result = here(
        repository, "--blob", f"file://{tmp_path}/b", "--consensus", consensus, AIOPERSIST_OPEN_TIMEOUT_S="1"
    )
    assert result.status == 2
    one_line(result)


def test_a_missing_extra_says_what_to_install() -> None:
    hide = "import sys; sys.modules['typer'] = None; from aiopersist.cli import main; main()"
    run = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr == "typer is not installed: pip install '.[cli]' in a clone of aiopersist\n"
