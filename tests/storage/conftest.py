"""Faults that only an operating system can make."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest


async def make_read_only(folder: Path) -> None:
    await anyio.run_process(["mount", "-o", "remount,ro", str(folder)])


@pytest.fixture(name="make_read_only")
def _make_read_only() -> Callable[[Path], Awaitable[None]]:
    return make_read_only


def open_files(below: Path) -> list[str]:
    """What this process holds open below the folder."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            target = str(fd.readlink())
        except FileNotFoundError:
            continue
        if target.startswith(str(below)):
            found.append(target)
    return found


@pytest.fixture(name="open_files")
def _open_files(tmp_path: Path) -> Callable[[], list[str]]:
    return lambda: open_files(tmp_path)
