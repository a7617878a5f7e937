"""Goal: who loses a race knows by the answer what came first: it reads nothing before the next try."""

from pathlib import Path

import pytest

import aiopersist as ap
from aiopersist.base.errors import Indeterminate
from aiopersist.storage.sqlite.consensus import SqliteConsensus
from tests.conftest import StoreUrls

TELLING = ("mem", "sqlite", "postgres")  # of an object store the answer tells no more than that it is lost


def requests(client: ap.Client) -> dict[str, int]:
    found = client.metrics().requests.items()
    return {name: op.count for name, op in found if name.startswith("consensus.")}


@pytest.mark.parametrize("tables", [1, 2])
async def test_a_lost_race_costs_one_request(location: StoreUrls, tables: int) -> None:
    if not location.consensus.startswith(TELLING):
        pytest.skip("the answer of this store does not tell")
    urls = {"blob": location.blob, "consensus": location.consensus, "maintenance": False}
    async with ap.open(**urls) as one, ap.open(**urls) as other:
        writers = [
            [await client.writer(f"w{number}", ap.Schema(str, int)) for number in range(tables)]
            for client in (one, other)
        ]
        for time in range(3):
            appends = [ap.Append(w, [("a", 1, time, 1)], time, time + 1) for w in writers[0]]
            await one.compare_and_append_many(appends)
        before = requests(other)
        with pytest.raises(ap.UpperMismatch) as refused:  # planned on what it knows, and lost to another
            await other.compare_and_append_many([ap.Append(w, [("b", 1, 0, 1)], 0, 1) for w in writers[1]])
        assert refused.value.current == ap.Antichain(3)
        sent = {name: count - before.get(name, 0) for name, count in requests(other).items()}
        sent = {name: count for name, count in sent.items() if count}
        assert sum(count for name, count in sent.items() if "compare" in name) == 1, sent
        assert sent.get("consensus.head", 0) == 0, sent


async def test_shards_that_have_not_moved_are_not_read(location: StoreUrls) -> None:
    """Goal: a commit to many shards that loses at one of them costs as much as to that one."""
    if not location.consensus.startswith(TELLING):
        pytest.skip("the answer of this store does not tell")
    urls = {"blob": location.blob, "consensus": location.consensus, "maintenance": False}
    async with ap.open(**urls) as one, ap.open(**urls) as other:
        schema = ap.Schema(str, int)
        theirs, *mine = [await other.writer(f"w{number}", schema) for number in range(5)]
        first = await one.writer("w0", schema)
        await other.compare_and_append_many([ap.Append(w, [("a", 1, 0, 1)], 0, 1) for w in [theirs, *mine]])
        await first.compare_and_append([("a", 1, 1, 1)], 1, 2)
        before = requests(other)
        with pytest.raises(ap.UpperMismatch):
            await other.compare_and_append_many(
                [ap.Append(w, [("b", 1, 1, 1)], 1, 2) for w in [theirs, *mine]]
            )
        sent = {name: count - before.get(name, 0) for name, count in requests(other).items()}
        assert sent.get("consensus.head", 0) == 0, sent
        assert sum(count for name, count in sent.items() if "compare" in name) == 1, sent


async def test_newer_tells_of_no_earlier_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal: a commit whose answer is lost takes no head for the newest that an earlier one lost to."""
    consensus = SqliteConsensus(tmp_path / "state.db")
    assert await consensus.compare_and_set("k", None, b"0")
    assert not await consensus.compare_and_set("k", None, b"lost")

    async def lost(work: object) -> None:
        raise Indeterminate("the answer is lost")

    monkeypatch.setattr(consensus._file, "write", lost)
    with pytest.raises(Indeterminate):
        await consensus.compare_and_set("k", 0, b"1")
    assert consensus.newer("k") is None
    await consensus.aclose()
