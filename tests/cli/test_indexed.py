"""Goal: of an `Indexed` the commands tell what they do with it: nothing of it is read in silence."""

import asyncio
from pathlib import Path

import pytest

import aiopersist as ap
from tests.cli.test_commands import aiopersist


async def _fill(folder: Path) -> None:
    async with ap.open(folder, maintenance=False) as client:
        await client.table("stock", str, int).put("a", 1)
        async with client.indexed("ix") as ix:
            stream = await ix.register("s", str, int)
            await ix.write([(stream, [(f"k{n}", n, 0, 1) for n in range(100)])])
            await ix.seal([stream], 1)


@pytest.fixture
def location(tmp_path: Path) -> Path:
    asyncio.run(_fill(tmp_path))
    return tmp_path


def test_fsck_reads_it(location: Path) -> None:
    for arguments in (["--all"], []):
        done = aiopersist("fsck", *arguments, "--location", location)
        assert (done.status, done.out.splitlines()[1:]) == (0, ["ix: sound, 100 updates in 1 part"])
    assert aiopersist("fsck", "ix", "--location", location).out == "ix: sound, 100 updates in 1 part\n"


def test_fsck_reads_one_with_the_name_of_a_table(location: Path) -> None:
    async def same_name() -> str:
        async with ap.open(location, maintenance=False) as client, client.indexed("stock"):
            return next(
                found.shard_id for found in await client.admin.overview("stock") if found.kind == "indexed"
            )

    known = asyncio.run(same_name())
    done = aiopersist("fsck", "--location", location)
    assert done.status == 0
    assert [line.partition(":")[0] for line in done.out.splitlines()] == ["stock", "ix", known]


def test_drop_counts_what_it_deletes(location: Path) -> None:
    assert "would delete 100 updates" in aiopersist("drop", "ix", "--location", location).out


def test_its_name_is_known(location: Path) -> None:
    for command in ("cat", "compact", "gc", "tail"):
        done = aiopersist(command, "ix", "--location", location)
        assert done.status == 1
        assert "'ix' is an Indexed, which its own calls read" in done.err + done.out
    assert "is an Indexed" not in aiopersist("cat", "nothing", "--location", location).err


def test_a_database_that_is_none(location: Path) -> None:
    """Goal: fsck is no help where it cannot open the location either."""
    for ending in ("", "-wal", "-shm"):
        (location / f"state.db{ending}").unlink(missing_ok=True)
    (location / "state.db").write_bytes(b"no database" * 1000)
    done = aiopersist("cat", "stock", "--location", location)
    assert done.status != 0
    assert "file is not a database" in done.err
    assert "fsck" not in done.err
