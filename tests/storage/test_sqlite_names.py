"""Goal: one file has one log, by whatever name it is opened: SQLite has the log beside that name."""

import os
from pathlib import Path

import pytest

from aiopersist.base.errors import StorageUnavailable
from aiopersist.storage.consensus import Versioned
from aiopersist.storage.sqlite.consensus import SqliteConsensus
from aiopersist.storage.sqlite.file import LOG_BYTES_MAX
from aiopersist.storage.sqlite.readonly import ReadonlySqliteConsensus


@pytest.fixture
def places(tmp_path: Path) -> tuple[Path, Path]:
    for name in "here", "there":
        (tmp_path / name).mkdir()
    return tmp_path / "here" / "state.db", tmp_path / "there" / "state.db"


async def test_a_file_with_two_names(places: tuple[Path, Path]) -> None:
    """A copy by hard links is the same file with another log: commits of one overwrite those of the other."""
    one = SqliteConsensus(places[0])
    assert await one.compare_and_set("k", None, b"0")
    os.link(*places)
    for other in SqliteConsensus(places[1]), ReadonlySqliteConsensus(places[1]):
        with pytest.raises(StorageUnavailable, match=r"there/state\.db: the file has 2 names") as caught:
            await other.head("k")
        assert not caught.value.retry
        await other.aclose()
    assert os.listdir(places[1].parent) == ["state.db"]
    places[1].unlink()
    assert await one.compare_and_set("k", 0, b"1")
    await one.aclose()


async def test_a_symbolic_link_to_the_file(places: tuple[Path, Path]) -> None:
    places[1].symlink_to(places[0])
    linked, direct = SqliteConsensus(places[1]), SqliteConsensus(places[0])
    assert await linked.compare_and_set("k", None, b"0")
    assert await direct.compare_and_set("k", 0, b"1")
    reader = ReadonlySqliteConsensus(places[1])
    assert await reader.head("k") == Versioned(1, b"1")
    await reader.aclose()
    for seqno in range(1, 8):
        assert await linked.compare_and_set("k", seqno, bytes(LOG_BYTES_MAX // 2))
    assert os.path.getsize(f"{places[0]}-wal") < 3 * LOG_BYTES_MAX
    os.unlink(f"{places[0]}-wal")
    with pytest.raises(StorageUnavailable, match="removed or replaced"):
        await linked.compare_and_set("k", 8, b"lost")
    await linked.aclose()
    await direct.aclose()
