"""Goal: a staged batch that is handed over, as bytes, to another handle, client or process is appended
there once, or deleted once, whoever else has the same bytes; and no deletion takes a blob that is named."""

import asyncio
import gc
import itertools
import json
import re
import subprocess
import sys
import uuid
import warnings
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pydantic
import pytest

import aiopersist as ap
from aiopersist.data.part.inline import checksum
from aiopersist.shard.attempt import Slot
from aiopersist.shard.commit import commit
from aiopersist.state.writing import ExpireWriter
from aiopersist.testing.faults import Faults, FaultyBlob, Outcome
from aiopersist.testing.model import gathered
from tests.support.processes import Clock
from tests.support.schemas import SCHEMA, Colour, Writer
from tests.support.shards import SIZES

ROWS = [("a", 1, 0, 1), ("b", 2, 1, 3)]


@dataclass
class World:
    """Clients of one place in memory, each like a process of its own."""

    stack: AsyncExitStack
    settings: dict[str, Any]
    faults: Faults = field(default_factory=Faults)
    copies: list[ap.Batch] = field(default_factory=list)

    def __post_init__(self) -> None:
        url = f"mem://{uuid.uuid4().hex}"
        self.blob = ap.open_blob(url)
        self.clock = Clock(ap.open_consensus(url), self.faults)

    async def client(self, **settings: Any) -> ap.Client:
        opening = ap.open(
            blob=FaultyBlob(self.blob, self.faults),
            consensus=self.clock,
            settings=ap.Settings(**{"retry_timeout_s": 3.0, **self.settings, **settings}),
            maintenance=False,
        )
        return await self.stack.enter_async_context(opening)

    async def writer(self, **settings: Any) -> Writer:
        """A writer of "t" in a client of its own."""
        return await self.stack.enter_async_context((await self.client(**settings)).writer("t", SCHEMA))

    async def restore(self, w: Writer, data: bytes) -> ap.Batch:
        """A copy that may be left unused: another one is used instead."""
        self.copies.append(await w.batch_from_transmittable(data))
        return self.copies[-1]

    async def blobs(self) -> list[str]:
        return sorted([key async for key, _ in self.blob.list("") if key.endswith(".parquet")])

    async def history(self) -> list[tuple[str, int, int, int]]:
        return await history(await self.client())


@asynccontextmanager
async def world(**settings: Any) -> AsyncIterator[World]:
    async with AsyncExitStack() as stack:
        w = World(stack, settings)
        try:
            yield w
        finally:
            w.faults.heal()
            for copy in w.copies:
                copy._staged.spent_elsewhere()


@pytest.fixture(params=SIZES)
async def place(request: pytest.FixtureRequest) -> AsyncIterator[World]:
    async with world(inline_writes_single_max_bytes=request.param) as w:
        yield w


async def history(client: ap.Client) -> list[tuple[str, int, int, int]]:
    """All updates of "t", summed, as a fresh reader gets them."""
    async with client.reader("t", SCHEMA) as r:
        upper: Any = await r.fetch_recent_upper()
        if upper == ap.Antichain(0):
            return []
        found: list[Any] = []
        async with r.subscribe(0) as changes:
            async for step in changes.steps():
                found += step.updates
                if upper <= step.upper:
                    return sorted((*what, diff) for what, diff in gathered(found).items())
    raise AssertionError("the subscription ended")


async def expire(w: Writer) -> None:
    """What any process does to a writer that was not heard of for long."""
    await commit(w._shard.register, ExpireWriter(w.writer_id), Slot())


def described(batch: ap.Batch) -> Any:
    parts = [(p.key, p.encoded_size_bytes, p.key_lower, p.stats, p.rewrite) for p in batch.parts]
    return batch.shard_id, batch.id, batch.lower, batch.upper, batch.len, batch.runs, parts


# --- what arrives ----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["same handle", "another handle", "another client"])
async def test_what_was_handed_over_arrives_whole(place: World, where: str) -> None:
    """Goal: every attribute, the statistics too, is the same there, and so are the updates."""
    w = await place.writer()
    batch = await w.batch(ROWS, 0, 2)
    before = described(batch)
    data = batch.to_transmittable()
    assert isinstance(data, bytes)
    there = w
    if where == "another handle":
        client = await place.client()
        there = await place.stack.enter_async_context(client.writer("t", SCHEMA))
    if where == "another client":
        there = await place.writer()
    restored = await there.batch_from_transmittable(data)
    assert described(restored) == before
    await there.compare_and_append_batch([restored], 0, 2)
    assert await place.history() == ROWS
    for used in (batch, restored):
        with pytest.raises(ap.InvalidUsage) as caught:
            await used.delete()
        assert caught.value.kind == ap.UsageKind.CONSUMED


class Item(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)

    name: str
    price: float | None
    tags: list[str]
    at: datetime


AT = datetime(2024, 5, 1, tzinfo=UTC)
VALUES = [
    pytest.param(bytes, [b"\xff\x00", b"\xfe" * 400, b""], id="bytes"),
    pytest.param(str, ["ä" * 300, "", "\U0010ffff" * 100], id="str"),
    pytest.param(float, [float("inf"), float("-inf"), float("nan"), -0.0, 1e308], id="float"),
    pytest.param(int, [-(2**63), 2**63 - 1], id="int"),
    pytest.param(bool, [True, False], id="bool"),
    pytest.param(Decimal, [Decimal("0.000000001"), Decimal(10) ** 20], id="decimal"),
    pytest.param(datetime, [AT], id="datetime"),
    pytest.param(date, [date(1, 1, 1), date(9999, 12, 31)], id="date"),
    pytest.param(uuid.UUID, [uuid.UUID(int=0), uuid.UUID(int=2**128 - 1)], id="uuid"),
    pytest.param(Colour, [Colour.RED, Colour.BLUE], id="enum"),
    pytest.param(int | None, [None, 3], id="optional"),
    pytest.param(list[str], [[], ["x", "y" * 300]], id="list"),
    pytest.param(
        Item,
        [Item(name="n", price=None, tags=["t"], at=AT), Item(name="", price=float("inf"), tags=[], at=AT)],
        id="model",
    ),
]


@pytest.mark.parametrize(("kind", "values"), VALUES)
async def test_values_of_every_kind_arrive(place: World, kind: Any, values: list[Any]) -> None:
    """Goal: least keys and statistics go through the bytes unchanged, whatever the type."""
    schema = ap.Schema(key=kind, val=kind)
    client, other = await place.client(), await place.client()
    async with client.writer("v", schema) as w, other.writer("v", schema) as there:
        batch = await w.batch([(v, v, 0, 1) for v in values], 0, 1)
        before = repr(described(batch))
        restored = await there.batch_from_transmittable(batch.to_transmittable())
        assert repr(described(restored)) == before  # as text: NaN is not NaN
        await there.compare_and_append_batch([restored], 0, 1)
    async with other.reader("v", schema) as r, r.snapshot() as s:
        found = [key for key, _, _ in await s.rows()]
        assert len(found) == len(values)
        assert all(any(f == v or (f != f and v != v) for f in found) for v in values)


async def test_a_rewritten_batch_keeps_its_rewrite(place: World) -> None:
    """Goal: rewritten here, handed over, rewritten further there: it reads at its last time."""
    w, there = await place.writer(), await place.writer()
    batch = await w.batch([("a", 1, 0, 1), ("a", 1, 0, 1), ("b", 1, 0, -2)], 0, 1)
    batch.rewrite_ts(5, 6)
    restored = await there.batch_from_transmittable(batch.to_transmittable())
    assert restored.upper == ap.Antichain(6)
    assert [part.rewrite for part in restored.parts] == [ap.Antichain(5)]
    with pytest.raises(ap.InvalidUsage) as caught:
        restored.rewrite_ts(4, 8)  # it never goes back
    assert caught.value.kind == ap.UsageKind.INVALID_REWRITE
    restored.rewrite_ts(7, 8)
    again = await w.batch_from_transmittable(restored.to_transmittable())
    await again.flush_to_blob()
    assert [part.rewrite for part in again.parts] == [ap.Antichain(7)]
    await w.compare_and_append([], 0, 6)
    await w.compare_and_append_batch([again], 6, 8)
    assert await place.history() == [("a", 1, 7, 2), ("b", 1, 7, -2)]


async def test_a_batch_of_many_parts_and_runs_arrives(place: World) -> None:
    w = await place.writer(blob_target_size=0)
    there = await place.writer()
    rows = [(key, n, 0, 1) for n, key in enumerate("cabed")]
    async with w.builder(0) as builder:
        await builder.extend(rows)
        batch = await builder.finish(1)
    assert len(batch.parts) == 5
    before = described(batch)
    restored = await there.batch_from_transmittable(batch.to_transmittable())
    assert described(restored) == before
    await there.compare_and_append_batch([restored], 0, 1)
    assert await place.history() == sorted(rows)


async def test_a_batch_without_parts_arrives(place: World) -> None:
    w, there = await place.writer(), await place.writer()
    batch = await w.batch([("a", 1, 0, 1), ("a", 1, 0, -1)], 0, 3)
    restored = await there.batch_from_transmittable(batch.to_transmittable())
    assert restored.parts == ()
    await there.compare_and_append_batch([restored], 0, 3)
    assert there.upper == ap.Antichain(3)
    assert await place.history() == []


async def test_a_schema_that_evolved_meanwhile(place: World) -> None:
    """Goal: a batch of a newer schema than the restoring handle's is appended there all the same."""

    class Old(pydantic.BaseModel):
        a: int

    class New(pydantic.BaseModel):
        a: int
        b: int | None = None

    old, new = ap.Schema(key=str, val=Old), ap.Schema(key=str, val=New)
    client, other = await place.client(), await place.client()
    async with client.writer("e", old) as w_old:
        await other.compare_and_evolve_schema("e", 0, new)
        async with other.writer("e", new) as w_new:
            batch = await w_new.batch([("k", New(a=1, b=2), 0, 1)], 0, 1)
            restored = await w_old.batch_from_transmittable(batch.to_transmittable())
            assert [part.key_lower for part in restored.parts] == ["k"]
            await w_old.compare_and_append_batch([restored], 0, 1)
    async with other.reader("e", new) as r, r.snapshot() as s:
        assert await s.rows() == [("k", New(a=1, b=2), 1)]


PROCESS = """
import asyncio, sys
import aiopersist as ap

async def main():
    blob, consensus, single, crash = *sys.argv[1:4], sys.argv[4] == "crash"
    limits = ap.Settings(inline_writes_single_max_bytes=int(single), writer_lease_s=60.0)
    async with ap.open(blob=blob, consensus=consensus, settings=limits) as client:
        async with client.writer("t", ap.Schema(key=str, val=int)) as w:
            batch = await w.batch([("a", 1, 0, 1), ("b", 2, 1, 1), ("b", 2, 0, 1)], 0, 2)
            sys.stdout.buffer.write(batch.to_transmittable())
            sys.stdout.buffer.flush()
            if crash:
                import os
                os._exit(0)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("single", "ending"), [(16384, "crash"), (0, "close")], ids=["inline, crash", "blob, close"]
)
async def test_from_one_process_to_another(tmp_path: Path, single: int, ending: str) -> None:
    """Goal: built in a process that is gone, rewritten and appended here, it reads exactly at its new
    time; from a copy of the bytes nothing more comes."""
    urls = f"file://{tmp_path}/blob?fsync=off", f"sqlite://{tmp_path}/state.db"
    arguments = [sys.executable, "-c", PROCESS, *urls, str(single), ending]
    done = await asyncio.to_thread(subprocess.run, arguments, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    async with ap.open(blob=urls[0], consensus=urls[1]) as client, client.writer("t", SCHEMA) as w:
        batch = await w.batch_from_transmittable(done.stdout)
        copy = await w.batch_from_transmittable(done.stdout)
        await w.compare_and_append([], 0, 10)
        batch.rewrite_ts(10, 11)
        await w.compare_and_append_batch([batch], 10, 11)
        assert await history(client) == [("a", 1, 10, 1), ("b", 2, 10, 2)]
        copy.rewrite_ts(11, 12)
        with pytest.raises(ap.AlreadyAppended):
            await w.compare_and_append_batch([copy], 11, 12)
        assert await history(client) == [("a", 1, 10, 1), ("b", 2, 10, 2)]


# --- what is refused -------------------------------------------------------------------------------


async def test_garbage_is_refused(place: World) -> None:
    """Goal: a clear, typed error for everything that is no batch; nothing changes."""
    w = await place.writer()
    batch = await w.batch(ROWS, 0, 2)
    data = batch.to_transmittable()
    head, body = data.split(b"\n", 1)
    before = await place.blobs(), (await w._shard.open()).seqno
    garbage: list[Any] = [
        b"",
        b"\n",
        b"garbage",
        b"\x00" * 1000,
        head,
        head + b"\n",
        body,
        data[1:],
        data + b"x",
    ]
    garbage += [data + data, data.upper(), {}, json.loads(body), None, 7, "text", data.decode("latin-1")]
    garbage += [data[:length] for length in range(0, len(data), 7)]
    for one in garbage:
        with pytest.raises(ap.InvalidUpdate) as caught:
            await w.batch_from_transmittable(one)
        assert caught.value.shard_id == w.shard_id
    assert (await place.blobs(), (await w._shard.open()).seqno) == before
    restored = await w.batch_from_transmittable(data)
    await w.compare_and_append_batch([restored], 0, 2)
    assert await place.history() == ROWS


async def test_every_flipped_bit_is_noticed(place: World) -> None:
    w = await place.writer()
    data = (await w.batch(ROWS, 0, 2)).to_transmittable()
    for position in range(len(data)):
        for bit in range(0, 8, 1 if position < 200 else 5):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with pytest.raises((ap.InvalidUpdate, ap.InvalidUsage)):
                await w.batch_from_transmittable(bytes(flipped))
    assert await place.history() == []
    await (await w.batch_from_transmittable(data)).delete()


def sealed(body: bytes, version: bytes = b"1") -> bytes:
    """Bytes with a right checksum."""
    return b"aiopersist-batch %s %s\n%s" % (version, checksum(body).encode(), body)


@pytest.mark.parametrize("version", [b"2", b"17", b"0", b"9" * 30])
async def test_another_format_is_refused(place: World, version: bytes) -> None:
    """Goal: bytes of a later version say so, whatever is in them."""
    w = await place.writer()
    with pytest.raises(ap.InvalidUpdate, match="format"):
        await w.batch_from_transmittable(sealed(b'{"what": "comes later"}', version))


async def test_a_format_of_absurd_length_is_garbage() -> None:
    async with world() as place:
        w = await place.writer()
        with pytest.raises(ap.InvalidUpdate):
            await w.batch_from_transmittable(sealed(b"{}", b"9" * 5000))


async def test_sealed_nonsense_is_refused(place: World) -> None:
    """Goal: a right checksum over the wrong thing is still no batch."""
    w = await place.writer()
    batch = await w.batch(ROWS, 0, 2)
    data = batch.to_transmittable()
    record = json.loads(data.split(b"\n", 1)[1])
    wrong: list[Any] = [{}, [], None, 1, {**record, "more": 1}, {**record, "batch": {}}, {**record, "id": 3}]
    wrong += [
        {name: value for name, value in record.items() if name != left} for left in ("id", "writer", "batch")
    ]
    for one in wrong:
        with pytest.raises(ap.InvalidUpdate):
            await w.batch_from_transmittable(sealed(json.dumps(one).encode()))
    await (await w.batch_from_transmittable(data)).delete()


async def test_a_batch_of_another_shard_is_refused(place: World) -> None:
    """Goal: both as bytes and as a batch, and it stays good for its own."""
    w = await place.writer()
    client = await place.client()
    async with client.writer("other", SCHEMA) as other:
        data = (await w.batch(ROWS, 0, 2)).to_transmittable()
        with pytest.raises(ap.InvalidUsage) as caught:
            await other.batch_from_transmittable(data)
        assert caught.value.kind == ap.UsageKind.BATCH_NOT_FROM_THIS_SHARD
        restored = await w.batch_from_transmittable(data)
        for append in (other.compare_and_append_batch([restored], 0, 2), other.append_batch(restored, 0, 2)):
            with pytest.raises(ap.InvalidUsage) as caught:
                await append
            assert caught.value.kind == ap.UsageKind.BATCH_NOT_FROM_THIS_SHARD
        assert await other.fetch_recent_upper() == ap.Antichain(0)
    await w.compare_and_append_batch([restored], 0, 2)
    assert await place.history() == ROWS


async def test_what_was_handed_over_is_consumed(place: World) -> None:
    w = await place.writer()
    batch = await w.batch(ROWS, 0, 2)
    data = batch.to_transmittable()
    with pytest.raises(ap.InvalidUsage) as caught:
        batch.to_transmittable()
    kinds = [caught.value.kind]
    with pytest.raises(ap.InvalidUsage) as caught:
        batch.rewrite_ts(1, 3)
    kinds.append(caught.value.kind)
    uses = [
        w.compare_and_append_batch([batch], 0, 2),
        w.append_batch(batch, 0, 2),
        batch.delete(),
        batch.flush_to_blob(),
    ]
    for use in uses:
        with pytest.raises(ap.InvalidUsage) as caught:
            await use
        kinds.append(caught.value.kind)
    assert set(kinds) == {ap.UsageKind.CONSUMED}
    del batch  # without a warning
    await (await w.batch_from_transmittable(data)).delete()
    assert await place.blobs() == []


async def test_a_consumed_batch_cannot_be_handed_over(place: World) -> None:
    w = await place.writer()
    deleted, appended = await w.batch(ROWS, 0, 2), await w.batch(ROWS, 0, 2)
    await deleted.delete()
    await w.compare_and_append_batch([appended], 0, 2)
    for batch in (deleted, appended):
        with pytest.raises(ap.InvalidUsage) as caught:
            batch.to_transmittable()
        assert caught.value.kind == ap.UsageKind.CONSUMED


async def test_two_copies_in_one_append_are_one_batch_twice(place: World) -> None:
    w, there = await place.writer(), await place.writer()
    data = (await w.batch(ROWS, 0, 2)).to_transmittable()
    copies = [await place.restore(there, data), await place.restore(w, data)]
    with pytest.raises(ap.InvalidUsage) as caught:
        await w.compare_and_append_batch(copies, 0, 2)
    assert caught.value.kind == ap.UsageKind.CONSUMED
    await w.compare_and_append_batch(copies[:1], 0, 2)  # both are free still
    with pytest.raises(ap.AlreadyAppended):
        await w.compare_and_append_batch(copies[1:], 1, 2)
    assert await place.history() == ROWS


# --- appended or deleted once ----------------------------------------------------------------------

SPENT = "spent"  # the answer of whoever comes second


async def by_append(w: Writer, batch: ap.Batch, at: int) -> None:
    await w.compare_and_append_batch([batch], at, 2)


async def by_replica(w: Writer, batch: ap.Batch, at: int) -> None:
    """Once the shard is at 2 it is covered: nothing to write, nothing of the other's to delete."""
    await w.append_batch(batch, 0, 2)


async def by_txn(w: Writer, batch: ap.Batch, at: int) -> None:
    """A second time it is a repeat: nothing to write, nothing of the other's to delete."""
    await w.compare_and_append_batch([batch], at, 2, txn=("app", 1))


async def by_delete(w: Writer, batch: ap.Batch, at: int) -> None:
    await batch.delete()


USES = [by_append, by_replica, by_txn, by_delete]


async def used(use: Any, w: Writer, batch: ap.Batch) -> str:
    """Use it at the upper that is there, as often as that takes; what came of it."""
    while True:
        try:
            await use(w, batch, (await w.fetch_recent_upper()).time)
        except ap.AlreadyAppended:
            return SPENT
        except ap.UpperMismatch:
            continue
        return "done"


async def check_blobs(place: World, w: Writer) -> list[str]:
    """Every blob that is named is there; and nothing else but what is returned."""
    state = await w._shard.open()
    named = {part.key for batch in state.batches.values() for part in batch.parts if part.key}
    there = set(await place.blobs())
    assert named <= there
    return sorted(there - named)


def appends(use: Any) -> bool:
    return use is not by_delete


@pytest.mark.parametrize("elsewhere", [False, True], ids=["same_handle", "another_client"])
@pytest.mark.parametrize(
    ("first", "second"), [(a, b) for a in USES for b in USES], ids=lambda use: use.__name__
)
async def test_of_two_copies_one_after_the_other(
    place: World, first: Any, second: Any, elsewhere: bool
) -> None:
    """Goal: the first decides; the second changes nothing, deletes nothing that is named, and is told."""
    builder, w = await place.writer(), await place.writer()
    other = await place.writer() if elsewhere else w
    data = (await builder.batch(ROWS, 0, 2)).to_transmittable()
    one, two = await place.restore(w, data), await place.restore(other, data)
    assert await used(first, w, one) == "done"
    blobs = await place.blobs()
    try:
        answer = await used(second, other, two) if appends(first) and second in (by_replica, by_txn) else None
    except ap.InvalidUsage:  # nothing is left to append to
        answer = None
    if answer is None and not (appends(first) and appends(second)):
        assert await used(second, other, two) == SPENT
    elif answer is None:
        three = await other.batch([], 2, 3)
        two.rewrite_ts(2, 3)
        three.rewrite_ts(2, 3)
        with pytest.raises(ap.AlreadyAppended):
            await other.compare_and_append_batch([three, two], 2, 3)
        await three.delete()
    await asyncio.sleep(0.01)
    assert await place.blobs() == blobs
    assert await check_blobs(place, w) == []
    assert await place.history() == (ROWS if appends(first) else [])


@pytest.mark.parametrize(
    ("first", "second"), list(itertools.combinations_with_replacement(USES, 2)), ids=lambda use: use.__name__
)
async def test_of_copies_used_at_once_one_wins(place: World, first: Any, second: Any) -> None:
    """Goal: in any interleaving, with slow stores and lost answers, the data is there once or deleted,
    never both, never twice."""
    w, other, third = await place.writer(), await place.writer(), await place.writer()
    total = 0
    for seed in range(3):
        place.faults._random.seed(seed)
        lower = total
        rows = [(f"k{seed}", seed, lower, 1)]
        batch = await w.batch(rows, lower, lower + 1)
        data = batch.to_transmittable()
        copies = [await place.restore(there, data) for there in (w, other, third)]

        async def use(how: Any, there: Writer, copy: ap.Batch, lower: int = lower, seed: int = seed) -> str:
            while True:
                try:
                    if how is by_delete:
                        await copy.delete()
                    elif how is by_replica:
                        await there.append_batch(copy, lower, lower + 1)
                    else:
                        txn = ("app", seed) if how is by_txn else None
                        await there.compare_and_append_batch([copy], lower, lower + 1, txn=txn)
                except ap.AlreadyAppended:
                    return SPENT
                except ap.UpperMismatch:
                    return "mismatch"
                return "done"

        place.faults.latency_s = (0.0, 0.003)
        place.faults.rates = dict.fromkeys((Outcome.LOST, Outcome.DROPPED, Outcome.LATE), 0.05)
        answers = await asyncio.gather(
            *(use(*what) for what in zip((first, second, first), (w, other, third), copies, strict=True))
        )
        place.faults.heal()
        place.faults.latency_s = (0.0, 0.0)
        await place.faults.land()
        await asyncio.sleep(0.005)
        upper: Any = (await w.fetch_recent_upper()).time
        assert "done" in answers, answers
        assert upper == lower + 1 or by_delete in (first, second)
        assert await check_blobs(place, w) == []
        found = [row for row in await place.history() if row[2] == lower]
        assert found == (rows if upper == lower + 1 else [])
        total = upper


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.LATE, Outcome.REFUSED])
async def test_a_deletion_of_a_copy_whose_answer_is_lost(outcome: Outcome) -> None:
    """Goal: it spends the id first; whatever becomes of that statement, the blobs go only if it did."""
    async with world(inline_writes_single_max_bytes=0) as place:
        w, other = await place.writer(), await place.writer()
        data = (await w.batch(ROWS, 0, 2)).to_transmittable()
        one, two = await place.restore(w, data), await place.restore(other, data)
        await w.fetch_recent_upper()  # its next statement is not a mismatch
        place.faults.fail_next("compare_and_set", outcome)
        await one.delete()
        await place.faults.land()
        assert await place.blobs() == []
        with pytest.raises(ap.AlreadyAppended):
            await other.compare_and_append_batch([two], 0, 2)
        assert await place.history() == []


@pytest.mark.parametrize("outcome", [Outcome.LOST, Outcome.DROPPED, Outcome.LATE])
async def test_a_deletion_of_a_copy_that_cannot_be_settled_leaves_its_blobs(outcome: Outcome) -> None:
    """Goal: the store is away; another copy may be appended still, so nothing is deleted."""
    async with world(inline_writes_single_max_bytes=0) as place:
        w, other = await place.writer(retry_timeout_s=0.05), await place.writer()
        data = (await w.batch(ROWS, 0, 2)).to_transmittable()
        one, two = await place.restore(w, data), await place.restore(other, data)
        await w.fetch_recent_upper()  # its next statement is not a mismatch
        place.faults.fail_next("compare_and_set", outcome)
        place.faults.fail_next("scan", Outcome.REFUSED, 1000)
        with pytest.raises(ap.Error):
            await one.delete()
        place.faults.heal()
        assert len(await place.blobs()) == 1
        try:
            await other.compare_and_append_batch([two], 0, 2)
        except ap.AlreadyAppended:
            assert outcome is Outcome.LOST
        await place.faults.land()
        assert len(await place.blobs()) == 1
        assert await place.history() == ([] if outcome is Outcome.LOST else ROWS)


async def test_a_failed_deletion_of_a_copy_can_be_repeated() -> None:
    """Goal: the id is spent, the blob store fails: the batch is still ours to delete."""
    async with world(inline_writes_single_max_bytes=0, retry_timeout_s=0.05) as place:
        w = await place.writer()
        data = (await w.batch(ROWS, 0, 2)).to_transmittable()
        copy = await place.restore(w, data)
        place.faults.fail_next("delete", Outcome.REFUSED, 1000)
        with pytest.raises(ap.StorageUnavailable):
            await copy.delete()
        place.faults.heal()
        assert len(await place.blobs()) == 1
        await copy.delete()
        assert await place.blobs() == []


async def test_a_cancelled_deletion_of_a_copy_goes_on() -> None:
    async with world(inline_writes_single_max_bytes=0) as place:
        w, other = await place.writer(), await place.writer()
        for steps in range(1, 40):
            data = (await w.batch(ROWS, 0, 2)).to_transmittable()
            one, two = await place.restore(w, data), await place.restore(other, data)
            deletion = asyncio.create_task(one.delete())
            for _ in range(steps):
                await asyncio.sleep(0)
            deletion.cancel()
            await asyncio.wait([deletion])
            for _ in range(200):
                if not await place.blobs():
                    break
                await asyncio.sleep(0.001)
            assert await place.blobs() == []
            with pytest.raises(ap.AlreadyAppended):
                await other.compare_and_append_batch([two], 0, 2)


async def test_a_copy_that_was_flushed_is_the_same_batch(place: World) -> None:
    """Goal: a copy turned into a blob of its own is still spent by the other; its own blob goes with it."""
    w, other = await place.writer(), await place.writer()
    data = (await w.batch(ROWS, 0, 2)).to_transmittable()
    one, two = await place.restore(w, data), await place.restore(other, data)
    await two.flush_to_blob()
    await w.compare_and_append_batch([one], 0, 2)
    with pytest.raises(ap.AlreadyAppended):
        await two.delete()
    assert await place.history() == ROWS
    await check_blobs(place, w)


async def test_appended_in_one_append_with_others(place: World) -> None:
    """Goal: one spent batch among several refuses all; the others stay free, their blobs too."""
    w, other = await place.writer(), await place.writer()
    data = (await w.batch(ROWS, 0, 4)).to_transmittable()
    one, two = await place.restore(w, data), await place.restore(other, data)
    more = await other.batch([("c", 3, 3, 1)], 0, 4)
    await w.compare_and_append_batch([one], 0, 2)
    with pytest.raises(ap.AlreadyAppended):
        await other.compare_and_append_batch([more, two], 2, 4)
    assert await place.history() == ROWS
    await other.compare_and_append_batch([more], 2, 4)
    assert await place.history() == [*ROWS, ("c", 3, 3, 1)]
    assert await check_blobs(place, w) == []


@pytest.mark.parametrize(
    "second",
    [
        by_append,
        by_delete,
    ],
)
@pytest.mark.parametrize("first", [by_append, by_delete])
async def test_a_spent_copy_is_dropped_without_a_warning(first: Any, second: Any) -> None:
    """Goal: `ResourceWarning` is about batches that nobody appended or deleted."""
    async with world(inline_writes_single_max_bytes=0) as place:
        w = await place.writer()
        data = (await w.batch(ROWS, 0, 2)).to_transmittable()
        one, two = await w.batch_from_transmittable(data), await w.batch_from_transmittable(data)
        await first(w, one, 0)
        if first is by_append:
            two.rewrite_ts(2, 3)
        bounds = (2, 3) if first is by_append else (0, 2)
        use = two.delete() if second is by_delete else w.compare_and_append_batch([two], *bounds)
        with pytest.raises(ap.AlreadyAppended):
            await use
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            del two, use
            await asyncio.sleep(0.01)
            gc.collect()
        assert not warned


async def test_a_copy_that_nobody_used_is_warned_of() -> None:
    """Goal: a restored batch is a batch: dropping it names its blobs."""
    async with world(inline_writes_single_max_bytes=0) as place:
        w = await place.writer()
        copy = await w.batch_from_transmittable((await w.batch(ROWS, 0, 2)).to_transmittable())
        (key,) = await place.blobs()
        with pytest.warns(ResourceWarning, match=re.escape(key)):
            del copy


# --- the builder's registration --------------------------------------------------------------------


async def test_the_registration_lives_until_the_batch_is_consumed() -> None:
    """Goal: its writer was closed with its client; who restored the batch keeps the lease, not longer."""
    async with world(writer_lease_s=0.7, inline_writes_single_max_bytes=0) as place:
        client = await place.client()
        async with client, client.writer("t", SCHEMA) as w:
            builder = w.writer_id
            data = (await w.batch(ROWS, 0, 2)).to_transmittable()
        there, bystander = await place.writer(), await place.writer()
        batch = await place.restore(there, data)
        for _ in range(6):  # every commit expires who is overdue
            await asyncio.sleep(0.2)
            await bystander.compare_and_append([], 0, 0)
        assert builder in (await there._shard.open()).writers
        await there.compare_and_append_batch([batch], 0, 2)
        assert await place.history() == ROWS
        for _ in range(6):
            await asyncio.sleep(0.2)
            await bystander.compare_and_append([], 2, 2)
        assert builder not in (await there._shard.open()).writers


async def test_a_registration_that_is_gone_is_told_at_restoring(place: World) -> None:
    w, there = await place.writer(), await place.writer()
    data = (await w.batch(ROWS, 0, 2)).to_transmittable()
    blobs = await place.blobs()
    await expire(w)
    with pytest.raises(ap.BatchExpired) as caught:
        await place.restore(there, data)
    assert caught.value.shard_id == there.shard_id
    with pytest.raises(ap.BatchExpired):
        await place.restore(w, data)
    assert await place.history() == []
    assert await place.blobs() == blobs  # the sweep's


async def test_a_registration_that_ends_later_is_told_at_the_append(place: World) -> None:
    w, there = await place.writer(), await place.writer()
    data = (await w.batch(ROWS, 0, 2)).to_transmittable()
    copies = [await place.restore(there, data) for _ in range(2)]
    await expire(w)
    for append in (there.compare_and_append_batch(copies[:1], 0, 2), there.append_batch(copies[0], 0, 2)):
        with pytest.raises(ap.BatchExpired):
            await append
    for copy in copies:
        await copy.delete()  # nobody can tell whether it was appended: consumed, its blobs left to the sweep
    assert await place.history() == []
    await there.compare_and_append(ROWS, 0, 2)
    assert await place.history() == ROWS


@pytest.mark.parametrize("single", SIZES)
async def test_an_expired_copy_of_an_appended_batch_deletes_nothing(single: int) -> None:
    """Goal: the record that says "spent" is gone with its writer; the blobs are still named."""
    async with world(inline_writes_single_max_bytes=single) as place:
        w, there = await place.writer(), await place.writer()
        data = (await w.batch(ROWS, 0, 2)).to_transmittable()
        one, two, three = [await place.restore(there, data) for _ in range(3)]
        await there.compare_and_append_batch([one], 0, 2, txn=("app", 1))
        await expire(w)
        await there.compare_and_append([], 2, 3)
        await two.delete()
        await there.compare_and_append_batch([three], 0, 2, txn=("app", 1))  # a repeat
        await asyncio.sleep(0.01)
        assert await check_blobs(place, there) == []
        assert await place.history() == ROWS


async def test_restoring_renews_a_registration_known_from_before() -> None:
    """Goal: each restored batch has a lease from its restoring on, also where an earlier one of the same
    writer was consumed here before."""
    async with world(writer_lease_s=1000.0) as place:
        w, there, bystander = await place.writer(), await place.writer(), await place.writer()
        first, second = [(await w.batch(ROWS, 0, 2)).to_transmittable() for _ in range(2)]
        await (await there.batch_from_transmittable(first)).delete()
        place.clock.ahead_s += 900
        for living in (there, bystander):
            await living._session.registration._heartbeat()
        batch = await there.batch_from_transmittable(second)
        place.clock.ahead_s += 200  # the next heartbeat is due after 250
        await bystander.compare_and_append([], 0, 0)
        await there.compare_and_append_batch([batch], 0, 2)


async def test_restoring_looks_whether_a_registration_known_from_before_is_gone() -> None:
    async with world() as place:
        w, there = await place.writer(), await place.writer()
        first, second = [(await w.batch(ROWS, 0, 2)).to_transmittable() for _ in range(2)]
        await (await there.batch_from_transmittable(first)).delete()
        await expire(w)
        with pytest.raises(ap.BatchExpired):
            batch = await there.batch_from_transmittable(second)
            await batch.delete()


async def test_many_handed_over_batches_keep_their_registration_while_the_writer_is_open() -> None:
    """Goal: the writer registers anew after some hundred; what was handed over under the earlier
    registration is alive as long as the writer is open."""
    async with world(writer_lease_s=0.8) as place:
        w = await place.writer()
        other = await place.writer()
        earlier = w.writer_id
        datas = [(await w.batch([], 0, 2)).to_transmittable() for _ in range(300)]
        assert w.writer_id != earlier
        for _ in range(8):
            await asyncio.sleep(0.2)
            await other.compare_and_append([], 0, 0)
        for data in (datas[0], datas[-1]):
            await (await place.restore(other, data)).delete()


@pytest.mark.parametrize(
    "at_once",
    [
        False,
        True,
    ],
)
async def test_heartbeats_of_restored_batches_end_with_the_handle(at_once: bool) -> None:
    """Goal: closing a writer with restored batches outstanding stops their heartbeats, also where several
    were restored at the same moment."""
    async with world(writer_lease_s=0.4) as place:
        client = await place.client()
        async with client.writer("t", SCHEMA) as w:
            datas = [(await w.batch(ROWS, 0, 2)).to_transmittable() for _ in range(3)]
        there = await client.writer("t", SCHEMA)
        limit = asyncio.Semaphore(3 if at_once else 1)

        async def restore(data: bytes) -> None:
            async with limit:
                await place.restore(there, data)

        await asyncio.gather(*map(restore, datas))
        observer = await place.client()
        await there.aclose()
        register = observer._shards.at(there.shard_id).register
        state = await register.refresh()
        assert state is not None
        await asyncio.sleep(0.5)
        later = await register.refresh()
        assert later is not None
        assert later.seqno == state.seqno


async def test_a_restored_batch_survives_its_handle(place: World) -> None:
    """Goal: the handle that restored it is closed: for the length of the lease the bytes are still good."""
    w = await place.writer()
    data = (await w.batch(ROWS, 0, 2)).to_transmittable()
    client = await place.client()
    async with client.writer("t", SCHEMA) as there:
        batch = await place.restore(there, data)
    async with client.writer("t", SCHEMA) as there:
        await there.compare_and_append_batch([batch], 0, 2)
        copy = await place.restore(there, data)
        with pytest.raises(ap.AlreadyAppended):
            await copy.delete()
    assert await place.history() == ROWS


async def test_handed_over_after_its_handle_was_closed(place: World) -> None:
    """Goal: closing a writer with an outstanding batch only stops its heartbeats."""
    client, there = await place.client(), await place.writer()
    async with client.writer("t", SCHEMA) as w:
        batch = await w.batch(ROWS, 0, 2)
    data = batch.to_transmittable()
    await client.aclose()
    restored = await place.restore(there, data)
    await there.compare_and_append_batch([restored], 0, 2)
    assert await place.history() == ROWS
