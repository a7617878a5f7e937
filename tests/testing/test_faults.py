"""Goal: faults are honest: a call happened if and only if its outcome says so."""

from collections.abc import AsyncIterator, Sequence

import pytest

from aiopersist.base.errors import Indeterminate, StorageUnavailable
from aiopersist.storage.blob import Blob
from aiopersist.testing.faults import Faults, FaultyBlob, Outcome


class Shelf(Blob):
    """As much of a store as the tests need."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    async def get(self, key: str) -> bytes | None:
        return self.kept.get(key)

    async def get_range(self, key: str, offset: int, length: int) -> bytes | None:
        return self.kept[key][offset : offset + length]

    async def set(self, key: str, data: bytes | memoryview) -> None:
        self.kept[key] = bytes(data)

    async def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.kept.pop(key, None)

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        for key, data in self.kept.items():
            yield key, len(data)

    async def aclose(self) -> None:
        return None


@pytest.mark.parametrize(
    ("outcome", "error", "happened"),
    [
        (Outcome.DONE, None, True),
        (Outcome.REFUSED, StorageUnavailable, False),
        (Outcome.LOST, Indeterminate, True),
        (Outcome.DROPPED, Indeterminate, False),
        (Outcome.LATE, Indeterminate, False),
    ],
)
async def test_each_outcome(outcome: Outcome, error: type[Exception] | None, happened: bool) -> None:
    faults = Faults()
    shelf = Shelf()
    blob = FaultyBlob(shelf, faults)
    faults.fail_next("set", outcome)
    if error is None:
        await blob.set("a", b"1")
    else:
        with pytest.raises(error):
            await blob.set("a", b"1")
    assert ("a" in shelf.kept) is happened
    await blob.set("b", b"2")  # one shot
    assert shelf.kept["b"] == b"2"
    assert faults.calls == {"set": 2}


async def test_a_late_call_lands_with_the_data_it_was_made_with() -> None:
    faults = Faults()
    shelf = Shelf()
    buffer = bytearray(b"old")
    faults.fail_next("set", Outcome.LATE)
    with pytest.raises(Indeterminate):
        await FaultyBlob(shelf, faults).set("a", memoryview(buffer))
    buffer[:] = b"new"
    assert faults.late == 1
    await faults.land()
    assert shelf.kept == {"a": b"old"}
    assert faults.late == 0


async def test_a_list_breaks_off() -> None:
    faults = Faults()
    shelf = Shelf()
    shelf.kept = {"a": b"", "b": b""}
    faults.fail_next("list", Outcome.LOST)
    seen = []
    with pytest.raises(Indeterminate):
        async for key, _ in FaultyBlob(shelf, faults).list(""):
            seen.append(key)
    assert seen == ["a"]


async def test_a_seed_repeats_its_schedule_and_heals() -> None:
    def drawn(seed: int) -> list[Outcome]:
        faults = Faults(seed, {Outcome.REFUSED: 0.2, Outcome.LOST: 0.2})
        return [faults.outcome("set") for _ in range(1000)]

    assert drawn(1) == drawn(1) != drawn(2)
    assert 120 < drawn(1).count(Outcome.LOST) < 280
    assert 500 < drawn(1).count(Outcome.DONE) < 700
    faults = Faults(1, {Outcome.REFUSED: 1.0})
    faults.heal()
    assert faults.outcome("set") is Outcome.DONE


def test_a_method_that_no_store_has_is_refused() -> None:
    """Goal: a misspelt name would let a test of faults pass for nothing."""
    with pytest.raises(ValueError, match="no store has a method 'compare_and_swap'"):
        Faults().fail_next("compare_and_swap", Outcome.LOST)
