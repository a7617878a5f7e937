"""Goal: rows of a stash that somebody has edited into what they cannot be are told as `Corruption`, with the
stash, the collection and the value, and are not read again and again."""

import sqlite3
from pathlib import Path

import pytest

import aiopersist as ap
from aiopersist.base.errors import Corruption
from aiopersist.stash import Stash, StashCollection
from tests.support.internals import session_of

pytestmark = pytest.mark.blocks_loop

EDITS = {
    "a text as a time": ("UPDATE stash_data SET time = 'x'", "'prices': a row has time 'x'"),
    "a time before all": ("UPDATE stash_data SET time = -1", "'prices': a row has time -1"),
    "a fraction as a diff": ("UPDATE stash_data SET diff = 1.5", "'prices': a row has diff 1.5"),
    "bytes as a key": ("UPDATE stash_data SET key = x'22ff22'", "'prices': a row has key"),
    "no UTF-8": ("UPDATE stash_data SET val = CAST(x'22ff22' AS TEXT)", "'prices': Could not decode"),
    "a text as an upper": ("UPDATE stash_uppers SET upper = 'x'", "'prices': upper is 'x'"),
    "an upper before all": ("UPDATE stash_uppers SET upper = -5", "'prices': upper is -5"),
    "a since beyond the upper": (
        "UPDATE stash_sinces SET since = 9",
        "since {9} is beyond upper {2}",
    ),
    "a text as a revision": ("UPDATE stash_uppers SET revision = 'x'", "'prices': revision is 'x'"),
    "no since": ("DELETE FROM stash_sinces", "'prices': its row of stash_sinces is gone"),
    "no upper": ("DELETE FROM stash_uppers", "'prices': its row of stash_uppers is gone"),
    "a text as a format": ("UPDATE stash_fence SET format = 'x'", "format is 'x'"),
}


async def filled(path: Path) -> tuple[Stash, StashCollection[str, int]]:
    stash = await ap.stash.open(f"sqlite://{path}")
    prices = await stash.collection("prices", str, int)
    batch = await prices.make_batch(stash)
    prices.append_to_batch(batch, "tea", 3, 1)
    await stash.append([batch])
    await stash.append([await prices.make_batch(stash)])
    return stash, prices


def edit(path: Path, statement: str) -> None:
    with sqlite3.connect(path) as connection:
        assert connection.execute(statement).rowcount == 1
    connection.close()


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", EDITS)
async def test_an_edited_row(name: str, tmp_path: Path) -> None:
    """Goal: in the stash that is open, and in the next one."""
    path, (statement, told) = tmp_path / "st.db", EDITS[name]
    stash, prices = await filled(path)
    edit(path, statement)
    with pytest.raises(Corruption) as error:
        await stash.iter(prices)
    assert told in str(error.value)
    assert "stash " in str(error.value)
    await stash.aclose()
    with pytest.raises(Corruption):
        async with await ap.stash.open(f"sqlite://{path}") as again:
            await again.iter(await again.collection("prices", str, int))


@pytest.mark.timeout(20)
async def test_a_consolidation_sums_no_texts(tmp_path: Path) -> None:
    """Goal: SQLite takes a text for 0 in a sum, which would then be written."""
    path = tmp_path / "st.db"
    stash, prices = await filled(path)
    edit(path, "INSERT INTO stash_data SELECT stash, collection_id, key, val, time, 'x' FROM stash_data")
    with pytest.raises(Corruption, match="'prices': a row of key"):
        await session_of(stash).consolidate(prices.id)
    with pytest.raises(Corruption, match="'prices': a row has diff 'x'"):
        await stash.iter(prices)
    await stash.aclose()


async def test_another_value_is_served(tmp_path: Path) -> None:
    """Goal: rows have no checksum: that one was edited to another valid value is not noticed."""
    path = tmp_path / "st.db"
    stash, prices = await filled(path)
    edit(path, "UPDATE stash_data SET val = '4'")
    assert [row[0] for row in await stash.iter(prices)] == [("tea", 4)]
    await stash.aclose()
