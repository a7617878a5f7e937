"""Goal: calls that share a commit share neither each other's errors, nor looks, nor context variables."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.errors import InvalidUsage, StorageUnavailable, UsageKind
from aiopersist.base.resource import Scope
from aiopersist.testing.faults import Faults, FaultyConsensus, Outcome
from aiopersist.write.pending import PendingAppend
from tests.table.kit import in_time, table

TENANT: ContextVar[str] = ContextVar("tenant")
LARGE = "x" * 40_000  # is uploaded


@pytest.fixture
async def deaf(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ap.Client, ap.Client, Faults]]:
    """A client that hears of nobody's commits, and another one, at one location; and the faults of the
    first."""
    url, faults = f"mem://{uuid.uuid4().hex}", Faults()
    consensus = FaultyConsensus(ap.open_consensus(url), faults)
    faults.losing_hints = True
    async with ap.open(url, maintenance=False) as other:
        async with ap.open(blob=url, consensus=consensus, maintenance=False) as client:
            yield client, other, faults
    await consensus.aclose()


async def test_no_answer_rests_on_a_look_at_another_table(
    deaf: tuple[ap.Client, ap.Client, Faults], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the group finds that another client was first; what wrote nothing to another table, whose state
    is old here, looks at that itself."""
    one, other, _ = deaf
    large, b = (one.table(name, key=str, val=str) for name in ("large", "b"))
    await large.put("begin", "")
    await b.put("k", "old")
    await other.table("b", key=str, val=str).delete("k")
    prepare, calls = PendingAppend.prepare, []

    async def prepared(self: PendingAppend) -> None:
        await prepare(self)
        if not calls:
            calls.append(self)
            await other.table("large", key=str, val=str).put("other", "")
            await self.session.shard.open()  # so it is refused before it is sent
            puts[1].cancel()

    monkeypatch.setattr(PendingAppend, "prepare", prepared)
    group = large._tables.group
    async with group.turn:  # so that they wait together
        puts = [asyncio.ensure_future(large.put("mine", LARGE)), asyncio.ensure_future(b.put("x", "y"))]
        insert = asyncio.ensure_future(b.insert("k", "new"))
        while group.queueing < 3:
            await asyncio.sleep(0)
    await in_time(asyncio.gather(*puts, insert, return_exceptions=True))
    assert calls
    assert puts[1].cancelled()
    assert await insert
    assert await b.get("k") == "new"


async def test_a_function_finds_the_context_of_its_call(mem: ap.Client) -> None:
    counts = table(mem)
    found: dict[str, str] = {}

    async def request(tenant: str) -> None:
        TENANT.set(tenant)

        def revised(count: int | None) -> int:
            found[tenant] = TENANT.get()
            return (count or 0) + 1

        await counts.update(tenant, revised)

    await asyncio.gather(*(request(f"tenant {number}") for number in range(5)))
    assert found == {tenant: tenant for tenant in found}
    assert len(found) == 5


async def test_an_error_of_a_commit_names_the_table_of_its_caller(
    deaf: tuple[ap.Client, ap.Client, Faults], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = deaf[0]
    tables = {name: table(one, name) for name in ("a", "b")}
    for each in tables.values():
        await each.put("k", 0)

    def refused() -> Any:
        raise StorageUnavailable("refused", retry=False)

    monkeypatch.setattr(one._shards.stack.clock, "now", refused)
    puts = [each.put("k", 1) for each in tables.values()]
    errors = await asyncio.gather(*puts, return_exceptions=True)
    assert [type(error) for error in errors] == [StorageUnavailable] * 2
    assert ["'a'" in str(errors[0]), "'b'" in str(errors[1])] == [True, True], errors
    assert ["'b'" in str(errors[0]), "'a'" in str(errors[1])] == [False, False], errors


async def test_an_error_that_calls_share_names_the_shard_of_each() -> None:
    shared = StorageUnavailable("refused")

    async def call(shard: str) -> StorageUnavailable:
        scope = Scope("a handle", None, shard)
        with pytest.raises(StorageUnavailable) as raised, scope.call():
            raise shared
        return raised.value

    errors = [await asyncio.create_task(call(f"s{number}")) for number in range(3)]
    assert [error.shard_id for error in errors] == ["s0", "s1", "s2"]


async def test_a_view_whose_table_is_closed_holds_nothing_any_more(mem: ap.Client) -> None:
    """Goal: an operation under way registers no reader that nobody would release."""
    opened = await mem.table("t", str, int, resident=False)
    await opened.put("a", 1)
    reading = (await opened._open()).reading
    await opened.aclose()
    with pytest.raises(InvalidUsage) as refused:
        await reading.need(ap.Antichain(0), None)
    assert refused.value.kind is UsageKind.CLOSED


async def test_a_put_whose_client_closes_says_that_it_may_have_happened(mem: ap.Client) -> None:
    counts = table(mem)
    await counts.put("k", 0)
    async with counts._tables.group.turn:
        put = asyncio.ensure_future(counts.put("k", 1))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(mem.aclose())
        with pytest.raises(InvalidUsage, match="may have happened"):
            await put
    await closing


async def test_a_commit_without_answer_is_in_doubt_whatever_the_look_meets(
    deaf: tuple[ap.Client, ap.Client, Faults], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goal: it happened; `Corruption` of the look would let the group do it once more."""
    one, _, faults = deaf
    counts = table(one)
    await counts.put("k", 0)
    consensus = one._shards.stack.consensus
    scan, damaged = consensus.scan, []

    async def scanned(*arguments: Any) -> Any:
        if not damaged:
            damaged.append(arguments)
            raise ap.Corruption("damaged for once")
        return await scan(*arguments)

    monkeypatch.setattr(consensus, "scan", scanned)
    faults.fail_next("compare_and_set", Outcome.LOST)
    with pytest.raises(ap.Indeterminate):
        await counts.update("k", lambda count: (count or 0) + 1)
    assert damaged
    assert await counts.update("k", lambda count: (count or 0) + 1) == 2
