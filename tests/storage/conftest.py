"""Faults that only an operating system can make."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.fixture
def make_read_only() -> Callable[[Path], None]:
    return lambda folder: subprocess.run(["mount", "-o", "remount,ro", folder], check=True) and None


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
