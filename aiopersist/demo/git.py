"""The first-parent history of a git repository as a stream of changes, in bounded memory.

1. `git rev-list` lists the commits, oldest first.
2. `git diff-tree --stdin` gets each commit with its first parent, and writes its changes in the same order.
   It waits while nobody reads its output.
3. `git cat-file --batch-check` writes the sizes of the blobs of a commit, in chunks that fit into a pipe in
   both directions, so that neither side blocks the other.

These are plumbing commands, so the user's configuration does not change their output. Paths are bytes, as in
git.
"""

import asyncio
import os
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import BaseModel

SUBMODULE = 0o160000
READ_BYTES = 64 * 1024
SIZES_AT_ONCE = 400  # ids of 65 bytes: they and their answers stay below the 64 KiB of a pipe


class GitError(Exception):
    """git is missing or failed; the message is one line."""


class FileVersion(BaseModel, frozen=True):
    """The facts of a path at a commit."""

    mode: int
    blob: bytes
    size: int | None  # `None` for a submodule


class FileChange(NamedTuple):
    """A changed path: `old` is `None` if it was added, `new` if it was deleted."""

    path: bytes
    old: FileVersion | None
    new: FileVersion | None


class GitCommit(NamedTuple):
    """A commit; numbers begin with 0 for the oldest one."""

    number: int
    id: str
    changes: list[FileChange]

    @property
    def updates(self) -> Iterator[tuple[bytes, FileVersion, int]]:
        """The changes as `(path, version, diff)`."""
        for path, old, new in self.changes:
            for version, diff in ((old, -1), (new, 1)):
                if version is not None:
                    yield path, version, diff


class _Raw(NamedTuple):
    path: bytes
    modes: tuple[int, int]
    blobs: tuple[str, str]


class Repository:
    """A repository; `await Repository.find(path)` checks that it exists."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    async def find(cls, path: Path) -> "Repository":
        """The repository that contains `path`; `GitError` if there is none."""
        repository = cls(path)
        await repository._output("rev-parse", "--git-dir")
        return repository

    async def first_parents(self, limit: int | None = None) -> list[str]:
        """The ids of the first-parent history of `HEAD`, oldest first, at most `limit`."""
        try:
            await self._output("rev-parse", "--verify", "--quiet", "HEAD^{commit}")
        except GitError:
            raise GitError(f"{self.path} has no commit yet") from None
        out = await self._output("rev-list", "--first-parent", "--reverse", "HEAD")
        return out.decode().split()[:limit]

    async def author_dates(self) -> dict[str, int]:
        """The author dates of the first-parent history by commit, in seconds since 1970, at least 0."""
        out = await self._output("rev-list", "--first-parent", "--pretty=tformat:%at", "HEAD")
        lines = iter(out.decode().splitlines())
        return {line.removeprefix("commit "): max(int(next(lines) or 0), 0) for line in lines}

    async def changes(self, commits: Sequence[str], start: int = 0) -> AsyncGenerator[GitCommit, None]:
        """The changes of each of `commits[start:]`. It owns processes: close it if you stop early."""
        options = ["--stdin", "--root", "-r", "-z", "--raw", "--no-abbrev", "--no-renames", "--no-relative"]
        async with AsyncExitStack() as stack:
            diffs = await stack.enter_async_context(
                self._running("diff-tree", *options, "--always", "--ignore-submodules=none")
            )
            sizes = await stack.enter_async_context(
                self._running("cat-file", "--batch-check=%(objectname) %(objectsize)")
            )
            pairs = [
                f"{commit} {commits[n - 1] if n else ''}\n" for n, commit in enumerate(commits) if n >= start
            ]
            feeder = asyncio.ensure_future(_feed(diffs, "".join(pairs).encode()))
            try:
                number = start
                async for commit, raw in _commits(diffs):
                    if number >= len(commits) or commit != commits[number]:
                        raise GitError(f"git diff-tree named {commit} out of order")
                    yield GitCommit(number, commit, await _with_sizes(raw, sizes))
                    number += 1
                await _check(diffs, "diff-tree")
            finally:
                feeder.cancel()
                await asyncio.gather(feeder, return_exceptions=True)
        if number != len(commits):
            raise GitError(f"git diff-tree stopped after {number} of {len(commits)} commits")

    async def tree(self, commit: str) -> AsyncIterator[tuple[bytes, FileVersion]]:
        """Every path of a commit, as `git ls-tree -r -l` prints them."""
        async with self._running("ls-tree", "-r", "-l", "-z", "--full-tree", commit) as process:
            async for line in _tokens(process):
                head, _, path = line.partition(b"\t")
                mode, _, blob, size = head.decode().split()
                yield (
                    path,
                    FileVersion(
                        mode=int(mode, 8), blob=bytes.fromhex(blob), size=None if size == "-" else int(size)
                    ),
                )
            await _check(process, "ls-tree")

    async def _output(self, *arguments: str) -> bytes:
        async with self._running(*arguments, errors=True) as process:
            out, errors = await process.communicate()
        if process.returncode:
            text = errors.decode(errors="replace").strip() or f"git {arguments[0]} failed"
            raise GitError(text.splitlines()[0].removeprefix("fatal: "))
        return out

    @asynccontextmanager
    async def _running(self, *arguments: str, errors: bool = False) -> AsyncIterator[Process]:
        try:
            process = await asyncio.create_subprocess_exec(
                "git",
                "-C",
                str(self.path),
                *arguments,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE if errors else DEVNULL,
                # a partial clone must not fetch blobs to learn their sizes
                env=os.environ | {"LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"},
            )
        except FileNotFoundError:
            raise GitError("there is no git on the PATH") from None
        try:
            yield process
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


async def _feed(process: Process, data: bytes) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # the process ended early; its status is checked elsewhere
        for at in range(0, len(data), READ_BYTES):
            process.stdin.write(data[at : at + READ_BYTES])
            await process.stdin.drain()
        process.stdin.close()


async def _check(process: Process, command: str) -> None:
    if await process.wait():
        raise GitError(f"git {command} failed with status {process.returncode}")


async def _tokens(process: Process) -> AsyncIterator[bytes]:
    """The output of the process, split at NULs."""
    assert process.stdout is not None
    rest = b""
    while data := await process.stdout.read(READ_BYTES):
        *whole, rest = (rest + data).split(b"\0")
        for token in whole:
            yield token


async def _commits(process: Process) -> AsyncIterator[tuple[str, list[_Raw]]]:
    """`id`, then `:modes blobs status`, `path` for each change; the next id ends a commit."""
    commit: str | None = None
    raw: list[_Raw] = []
    pending: tuple[tuple[int, int], tuple[str, str]] | None = None
    async for token in _tokens(process):
        if pending is not None:
            raw.append(_Raw(token, *pending))
            pending = None
        elif token.startswith(b":"):
            old_mode, new_mode, old, new, _ = token[1:].decode().split()
            pending = (int(old_mode, 8), int(new_mode, 8)), (old, new)
        else:
            if commit is not None:
                yield commit, raw
            commit, raw = token.decode().strip(), []
    if commit is not None:
        yield commit, raw


async def _with_sizes(raw: Sequence[_Raw], process: Process) -> list[FileChange]:
    versions = [v for change in raw for v in zip(change.modes, change.blobs, strict=True)]
    sized = [blob for mode, blob in versions if mode not in (0, SUBMODULE)]
    sizes = iter(await _sizes(sized, process))
    file_versions = [
        FileVersion(mode=mode, blob=bytes.fromhex(blob), size=None if mode == SUBMODULE else next(sizes))
        if mode
        else None
        for mode, blob in versions
    ]
    return [FileChange(change.path, *file_versions[2 * n : 2 * n + 2]) for n, change in enumerate(raw)]


async def _sizes(blobs: Sequence[str], process: Process) -> list[int | None]:
    assert process.stdin is not None
    assert process.stdout is not None
    sizes: list[int | None] = []
    for at in range(0, len(blobs), SIZES_AT_ONCE):
        chunk = blobs[at : at + SIZES_AT_ONCE]
        process.stdin.write("".join(f"{blob}\n" for blob in chunk).encode())
        await process.stdin.drain()
        for blob in chunk:
            answer = (await process.stdout.readline()).decode().split()
            if len(answer) != 2 or answer[0] != blob:
                raise GitError(f"git cat-file did not answer for {blob}")
            sizes.append(None if answer[1] == "missing" else int(answer[1]))
    return sizes
