"""Faults that only an operating system can make; places in Google Cloud Storage and in a bucket in memory."""

import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from tests.storage.gcs_stand_in import StandIn, gcs_stand_in
from tests.storage.objects_kit import Place


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


@pytest.fixture
async def gcs_url() -> AsyncIterator[str]:
    """A URL of an empty place: below the one that `AIOPERSIST_TEST_GCS` names, which is `gs://bucket/prefix`
    with options, or in a stand-in."""
    named, prefix = os.environ.get("AIOPERSIST_TEST_GCS"), f"t-{uuid.uuid4().hex[:16]}"
    if named:
        place, mark, options = named.partition("?")
        yield f"{place.rstrip('/')}/{prefix}{mark or '?'}{options}"
        return
    async with gcs_stand_in() as server:
        yield server.url(prefix)


@pytest.fixture
async def google() -> AsyncIterator[StandIn]:
    """The stand-in for Google Cloud Storage."""
    async with gcs_stand_in() as server:
        yield server


@pytest.fixture
def place() -> Place:
    """An empty place in a bucket in memory, whose handles count their requests."""
    return Place()
