"""Goal: a critical since whose consumer is gone can be found and ended; then its id is free again."""

from collections.abc import AsyncIterator

import pytest

import aiopersist as ap
from tests.support.schemas import SCHEMA


@pytest.fixture
async def client() -> AsyncIterator[ap.Client]:
    async with ap.open("mem://") as client, client.writer("t", SCHEMA) as writer:
        for n in range(5):
            await writer.write([("a", n)])
        yield client


async def test_it_is_released(client: ap.Client) -> None:
    """Goal: history moves on without it; the earlier handles are told; the id begins anew, at the shard's
    since."""
    other = await client.critical_since("t", "mailer")
    async with client.critical_since("t", "mailer", opaque=7) as mailer, client.reader("t") as reader:
        await reader.downgrade_since(4)
        assert (await client.admin.inspect("t")).since == ap.Antichain(0)
        with pytest.raises(ap.OpaqueMismatch) as caught:
            await mailer.release(8)
        assert (caught.value.expected, caught.value.actual) == (8, 0)
        await mailer.release(mailer.opaque)
        view = await client.admin.inspect("t")
        assert (view.critical, view.since) == ({}, ap.Antichain(0))
        await reader.downgrade_since(4)
        assert (await client.admin.inspect("t")).since == ap.Antichain(4)
    for call in (other.compare_and_downgrade_since(0, 1, 2), other.release(0)):
        with pytest.raises(ap.OpaqueMismatch, match="released") as caught:
            await call
        assert caught.value.actual is None
    with pytest.raises(ap.InvalidUsage):
        await mailer.release(7)  # closed
    async with client.critical_since("t", "mailer", opaque=3) as again:
        assert (again.since, again.opaque) == (ap.Antichain(4), 3)


async def test_who_keeps_history_can_be_seen(client: ap.Client) -> None:
    """Goal: a consumer that is forgotten is the first of the holds that since waits for."""
    await client.critical_since("t", "forgotten")
    moved = await client.critical_since("t", "mailer")
    await moved.compare_and_downgrade_since(0, 0, 4)
    await client.reader("t", hold_name="nightly", hold=2)
    await client.admin.retain("t", 1)
    await client.admin.force_compaction("t")
    async with client.reader("t") as reader, reader.listen(as_of=3):
        view = await client.admin.inspect("t")
    assert view.since == ap.Antichain(0)
    found = [(hold.kind, hold.id, hold.behind, hold.pins) for hold in view.holds]
    assert found[:2] == [("critical", "forgotten", 5, True), ("named", "nightly", 3, False)]
    assert ("critical", "mailer", 1, False) in found
    assert ("retention", "retain", 1, False) in found


async def test_an_opaque_is_an_int(client: ap.Client) -> None:
    for opaque in ("me", 1.0, 2**63, True):
        with pytest.raises(TypeError, match="is not an opaque: give an int"):
            await client.critical_since("t", "other", opaque=opaque)  # type: ignore[arg-type]  # that is the test
    assert (await client.admin.inspect("t")).critical == {}
