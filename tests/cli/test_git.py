"""The stream of changes agrees with git about each tree: odd paths, merges, modes, submodules."""

import asyncio
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from aiopersist.demo.git import FileVersion, GitError, Repository

Git = Callable[..., str]

pytestmark = pytest.mark.blocks_loop  # by git, run to make the repositories


def git_in(folder: Path) -> Git:
    env = os.environ | {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        **{f"GIT_{who}_{what}": "a@b.c" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }

    def git(*arguments: str | bytes) -> str:
        done = subprocess.run(["git", "-C", folder, *arguments], env=env, capture_output=True, check=True)
        return done.stdout.decode(errors="surrogateescape")

    return git


@pytest.fixture
def repository(tmp_path: Path) -> tuple[Path, Git]:
    git = git_in(tmp_path)
    git("init", "-q", "-b", "main")
    return tmp_path, git


def commit(git: Git, message: str) -> None:
    git("add", "-A")
    git("commit", "-q", "--allow-empty", "-m", message)


async def trees(path: Path) -> list[dict[bytes, FileVersion]]:
    """The tree after each commit, from the changes alone; every retraction must meet its row."""
    repository = await Repository.find(path)
    commits = await repository.first_parents()
    tree: dict[bytes, FileVersion] = {}
    found = []
    async for one in repository.changes(commits):
        assert (one.number, one.id) == (len(found), commits[len(found)])
        for change in one.changes:
            if change.old is not None:
                assert tree.pop(change.path) == change.old
            if change.new is not None:
                assert change.path not in tree
                tree[change.path] = change.new
        found.append(dict(tree))
    assert len(found) == len(commits)
    return found


async def check(path: Path) -> list[dict[bytes, FileVersion]]:
    """After every commit it is what `git ls-tree` says."""
    repository = await Repository.find(path)
    found = await trees(path)
    for commit_id, tree in zip(await repository.first_parents(), found, strict=True):
        assert {p: v async for p, v in repository.tree(commit_id)} == tree
    return found


async def test_additions_changes_modes_links_deletions_and_empty_commits(
    repository: tuple[Path, Git],
) -> None:
    path, git = repository
    (path / "a").write_text("one")
    (path / "folder").mkdir()
    (path / "folder" / "b").write_text("two")
    commit(git, "1")
    commit(git, "nothing")
    (path / "a").write_text("three!")
    (path / "folder" / "b").chmod(0o755)
    (path / "link").symlink_to("a")
    commit(git, "2")
    (path / "link").unlink()
    (path / "link").write_text("no link any more")
    (path / "a").rename(path / "renamed")
    commit(git, "3")
    for file in ("link", "renamed", "folder/b"):
        (path / file).unlink()
    commit(git, "all gone")
    found = await check(path)
    assert found[0] == found[1]
    assert found[0][b"a"].size == 3
    assert found[2][b"a"].size == 6
    assert (found[2][b"folder/b"].mode, found[2][b"link"].mode) == (0o100755, 0o120000)
    assert set(found[3]) == {b"folder/b", b"link", b"renamed"}
    assert found[4] == {}


async def test_paths_are_bytes(repository: tuple[Path, Git]) -> None:
    path, git = repository
    odd = [b"latin-\xe9", "grüße".encode(), b"a\nb\tc", b'"quoted"', b":colon", b"a" * 40]
    for name in odd:
        (path / os.fsdecode(name)).write_text("x")
    commit(git, "odd")
    (found,) = await check(path)
    assert set(found) == set(odd)


async def test_the_first_parent_decides_what_a_merge_changed(repository: tuple[Path, Git]) -> None:
    path, git = repository
    (path / "a").write_text("1")
    commit(git, "base")
    git("checkout", "-q", "-b", "side")
    for n in range(3):
        (path / f"side-{n}").write_text("s")
        commit(git, f"side {n}")
    git("checkout", "-q", "main")
    (path / "main").write_text("m")
    commit(git, "main")
    git("merge", "-q", "--no-ff", "-m", "merge", "side")
    found = await check(path)
    assert [len(tree) for tree in found] == [1, 2, 5]


async def test_a_submodule_has_no_size(repository: tuple[Path, Git]) -> None:
    path, git = repository
    (path / "a").write_text("1")
    git("add", "a")
    git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},sub")
    git("commit", "-q", "-m", "with a submodule")
    git("update-index", "--cacheinfo", f"160000,{'2' * 40},sub")
    git("commit", "-q", "-m", "moved")
    found = await check(path)
    assert found[0][b"sub"] == FileVersion(mode=0o160000, blob=b"\x11" * 20, size=None)
    assert found[1][b"sub"].blob == b"\x22" * 20


async def test_a_commit_with_more_files_than_a_pipe_holds(repository: tuple[Path, Git]) -> None:
    path, git = repository
    for n in range(3000):
        (path / f"file-{n:05}").write_text(str(n))
    commit(git, "many")
    async with asyncio.timeout(60):
        (found,) = await check(path)
    assert len(found) == 3000


async def test_users_configuration_changes_nothing(repository: tuple[Path, Git]) -> None:
    path, git = repository
    for key, value in [
        ("diff.renames", "copies"),
        ("diff.relative", "true"),
        ("diff.noprefix", "true"),
        ("core.quotePath", "true"),
        ("log.showSignature", "true"),
        ("diff.ignoreSubmodules", "all"),
        ("diff.orderFile", "order"),
    ]:
        git("config", key, value)
    (path / "order").write_text("z*\n")
    (path / "folder").mkdir()
    for name in ("a", "folder/ä", "z"):
        (path / name).write_text("the same")
    commit(git, "1")
    (path / "a").rename(path / "b")
    git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},sub")
    commit(git, "2")
    await check(path)
    assert await trees(path / "folder") == await trees(path)  # the whole repository, from within


async def test_it_starts_in_the_middle_and_stops_at_a_limit(repository: tuple[Path, Git]) -> None:
    path, git = repository
    for n in range(5):
        (path / "a").write_text("x" * n)
        commit(git, str(n))
    found = await Repository.find(path)
    ids = await found.first_parents(limit=4)
    assert ids == (await found.first_parents())[:4]
    late = [one async for one in found.changes(ids, start=2)]
    assert [one.number for one in late] == [2, 3]
    (change,) = late[0].changes
    assert (change.old and change.old.size, change.new and change.new.size) == (1, 2)
    stream = found.changes(ids)
    async for _ in stream:
        break
    await stream.aclose()  # type: ignore[attr-defined]  # an async generator


async def test_what_is_missing_is_said_in_one_line(
    tmp_path: Path, repository: tuple[Path, Git], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = repository
    with pytest.raises(GitError, match="no commit yet"):
        await (await Repository.find(path)).first_parents()
    with pytest.raises(GitError, match="cannot change to"):
        await Repository.find(path / "nowhere")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    (path / ".git").rename(path / "no-git")
    with pytest.raises(GitError, match="not a git repository"):
        await Repository.find(path)
    monkeypatch.setenv("PATH", str(path / "empty"))
    with pytest.raises(GitError, match="no git on the PATH"):
        await Repository.find(path)
