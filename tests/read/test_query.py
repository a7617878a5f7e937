"""Goal: a condition gives exactly the rows that match, a choice of columns their sums; both reduce the
fetched bytes, and neither changes the result."""

import datetime
import random
import uuid
from collections import Counter
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pydantic import BaseModel

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyBlob
from tests.support.schemas import NAN, SCHEMA


class Key(BaseModel, frozen=True):
    region: str
    number: int


class Val(BaseModel):
    amount: int | None
    number: float
    tags: list[str] = []


MODELS = ap.Schema(key=Key, val=Val)
BOUNDS: dict[str, dict[str, Any]] = {
    "inline": {},
    "blobs": {"inline_writes_single_max_bytes": 0},
    "tiny parts": {"inline_writes_single_max_bytes": 0, "blob_target_size": 200, "blob_cache_bytes": 0},
    "tiny row groups": {
        "inline_writes_single_max_bytes": 0,
        "row_group_bytes": 100,
        "blob_cache_bytes": 0,
    },
}

CONDITIONS: dict[str, tuple[Any, Any]] = {
    "key field": (pc.field("key", "region") == "b", lambda k, v: k.region == "b"),
    "flat name": (pc.field("region") > "a", lambda k, v: k.region > "a"),
    "range": (
        (pc.field("key", "number") >= 3) & (pc.field("key", "number") < 6),
        lambda k, v: 3 <= k.number < 6,
    ),
    "val": (pc.field("amount") < 2, lambda k, v: v.amount is not None and v.amount < 2),
    "null": (pc.field("val", "amount").is_null(), lambda k, v: v.amount is None),
    "float": (pc.field("val", "number") > 1.0, lambda k, v: v.number > 1.0),
    "either": (
        (pc.field("region") == "a") | (pc.field("amount") == 3),
        lambda k, v: k.region == "a" or v.amount == 3,
    ),
    "none": (pc.field("region") == "z", lambda k, v: False),
    "all": (pc.field("region") != "z", lambda k, v: True),
}


def client_of(bounds: str, blob: Any = None, consensus: str = "mem://") -> Any:
    settings = ap.Settings(**BOUNDS[bounds])
    if blob is None:
        return ap.open("mem://", settings=settings, maintenance=False)
    return ap.open(blob=blob, consensus=consensus, settings=settings, maintenance=False)


async def filled(client: ap.Client, seed: int = 0, appends: int = 4) -> list[tuple[Key, Val, int]]:
    """Random updates, some of which meet and cancel; the contents at the end."""
    chance = random.Random(seed)
    keys = [Key(region=region, number=number) for region in "abc" for number in range(8)]
    vals = [
        Val(amount=a, number=n, tags=t) for a in (None, 1, 2, 3) for n in (0.0, 1.5) for t in ([], ["x", "y"])
    ]
    sums: Counter[tuple[Key, str]] = Counter()
    async with client.writer("s", MODELS) as writer:
        for time in range(appends):
            rows = [
                (chance.choice(keys), chance.choice(vals), time, chance.choice([1, 1, 2, -1]))
                for _ in range(30)
            ]
            await writer.compare_and_append(rows, time, time + 1)
            for key, val, _, diff in rows:
                sums[key, val.model_dump_json()] += diff
    return [(key, Val.model_validate_json(val), diff) for (key, val), diff in sums.items() if diff]


def sorted_rows(rows: Any) -> list[str]:
    return sorted(map(repr, rows))


@pytest.mark.parametrize("bounds", BOUNDS)
async def test_what_matches_is_given_in_every_form(bounds: str) -> None:
    async with client_of(bounds) as client:
        model = await filled(client)
        async with client.reader("s", MODELS) as reader, reader.snapshot() as s:
            for where, matches in CONDITIONS.values():
                expected = [row for row in model if matches(row[0], row[1])]
                rows = await s.rows(where=where)
                assert sorted_rows(rows) == sorted_rows(expected), where
                places = {repr(row): place for place, row in enumerate(await s.rows())}
                assert [places[repr(row)] for row in rows] == sorted(places[repr(row)] for row in rows)
                table = await s.to_arrow(where=where)
                batches = [batch async for batch in s.batches(where=where)]
                assert pa.Table.from_batches(batches, table.schema).equals(table)
                assert table.num_rows == len(rows)
                frames = await s.to_polars(where=where), await s.to_pandas(where=where)
                assert [len(frame) for frame in frames] == [len(rows)] * 2


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown field": ({"where": pc.field("nothing") == 1}, "nothing"),
    "a name that is not unique": ({"where": pc.field("number") == 1}, "number"),
    "the time": ({"where": pc.field("time") == 1}, "time"),
    "another type": ({"where": pc.field("region") == 1}, "region"),
    "a text": ({"where": "region = 'a'"}, "expression, not str"),
    "an unknown column": ({"columns": ["nothing"]}, "'nothing'"),
    "an unknown field of val": ({"columns": ["val.nothing"]}, "'val.nothing'"),
    "a column that is not unique": ({"columns": ["number"]}, "'number'"),
    "a column twice": ({"columns": ["key", "key"]}, "different"),
    "no list": ({"columns": "key"}, "list"),
    "no name": ({"columns": [["key"]]}, "list"),
    "the diff": ({"columns": ["diff"]}, "'diff'"),
}


async def test_what_is_not_there_is_refused() -> None:
    async with client_of("inline") as client:
        await filled(client)
        async with client.reader("s", MODELS) as reader, reader.snapshot() as s:
            for asked, message in REFUSED.values():
                for call in (s.rows, s.to_arrow, s.to_polars, s.to_pandas, s.batches):
                    with pytest.raises(ap.InvalidUsage, match=message) as caught:
                        found = call(**asked)
                        await found  # type: ignore[misc]  # `batches` raises at once
                    assert caught.value.kind == ap.UsageKind.INVALID_COLUMN


async def test_parts_and_row_groups_that_cannot_match_are_not_fetched() -> None:
    """Goal: by statistics of the state whole parts, by the index of a large part its row groups."""
    faults = Faults()
    name = uuid.uuid4().hex
    blob = FaultyBlob(ap.open_blob(f"mem://{name}"), faults)
    async with client_of("tiny row groups", blob, f"mem://{name}") as client:
        async with client.writer("t", SCHEMA) as writer:
            for time, letter in enumerate("abcd"):
                rows = [(f"{letter}{i:03}", i, time, 1) for i in range(200)]
                await writer.compare_and_append(rows, time, time + 1)
        async with client.reader("t", SCHEMA) as reader, reader.snapshot() as s:
            counted = Counter(faults.calls)
            assert await s.rows(pc.field("key") == "c100") == [("c100", 100, 1)]
            asked = Counter(faults.calls) - counted
            assert asked["get_range"] == 2  # the index, and a range; of three parts nothing
            assert asked["get"] == 0
            counted = Counter(faults.calls)
            assert await s.rows(pc.field("key") == "x") == []
            assert Counter(faults.calls) == counted
            counted = Counter(faults.calls)
            batches = [b async for b in s.batches(pc.field("val") == 199)]
            assert sum(b.num_rows for b in batches) == 4
            asked = Counter(faults.calls) - counted
            assert (asked["get_range"], asked["get"]) == (8, 0)


async def test_conditions_on_fields_that_came_later() -> None:
    """Goal: parts of an older schema read with nulls, also in conditions; an older reader asks by its own."""

    class Later(Val):
        note: str | None = None

    async with client_of("tiny row groups") as client:
        model = await filled(client)
        later = ap.Schema(key=Key, val=Later)
        await client.compare_and_evolve_schema("s", 0, later)
        async with client.writer("s", later) as writer:
            new = (Key(region="a", number=0), Later(amount=1, number=0.5, note="n"), 9, 1)
            await writer.compare_and_append([new], 4, 10)
        async with client.reader("s", later) as reader, reader.snapshot() as s:
            assert await s.rows(pc.field("note") == "n") == [(new[0], new[1], 1)]
            assert len(await s.rows(pc.field("note").is_null())) == len(model)
            assert await s.rows(pc.field("note") == "n", columns=["note"]) == [("n", 1)]
        async with client.reader("s", MODELS) as reader, reader.snapshot() as s:
            assert len(await s.rows(pc.field("val", "number") == 0.5)) == 1
            with pytest.raises(ap.InvalidUsage, match="note"):
                await s.rows(pc.field("note") == "n")


async def test_only_final_sums_are_out_of_range() -> None:
    """Goal: a projection may sum beyond 64 bits on the way, not at the end."""
    top = 2**63 - 1
    async with client_of("blobs") as client:
        async with client.writer("t", SCHEMA) as writer:
            rows = [("a", 1, 0, top), ("a", 2, 0, top), ("b", 1, 0, 1), ("b", 2, 0, -top)]
            await writer.compare_and_append(rows, 0, 1)
            await writer.compare_and_append([("a", 3, 1, -top)], 1, 2)
        async with client.reader("t", SCHEMA) as reader:
            async with reader.snapshot(0) as s:
                with pytest.raises(ap.DiffOverflow):
                    await s.rows(columns=["key"])
                with pytest.raises(ap.DiffOverflow):
                    [b async for b in s.batches(columns=["key"])]
            async with reader.snapshot(1) as s:
                assert await s.rows(columns=["key"]) == [("a", top), ("b", 1 - top)]
                found = [row for b in [b async for b in s.batches(columns=["key"])] for row in b.to_pylist()]
                assert found == [{"key": "a", "diff": top}, {"key": "b", "diff": 1 - top}]


@pytest.mark.parametrize("bounds", ["inline", "tiny parts", "tiny row groups"])
async def test_parts_are_fetched_one_by_one_elsewhere(bounds: str) -> None:
    """Goal: all parts together are the snapshot, in another client too, beside any other work."""
    name = f"mem://{uuid.uuid4().hex}"
    async with client_of(bounds, name, name) as client, client_of(bounds, name, name) as elsewhere:
        await filled(client)
        async with client.reader("s", MODELS) as reader, reader.snapshot(as_of=2) as s:
            sent = [part.to_transmittable() for part in s.parts()]
            async with client.writer("s", MODELS) as writer:
                await writer.compare_and_append([], 4, 5)
            await client.admin.force_compaction("s")
            await client.admin.force_gc("s")
            sums: Counter[str] = Counter()
            for data in sent:
                updates = await elsewhere.fetch_part(data, MODELS)
                assert {update.time for update in updates} <= {2}
                for key, val, _, diff in updates:
                    sums[repr((key, val))] += diff
            expected = {repr((key, val)): diff for key, val, diff in await s.rows()}
            assert {row: diff for row, diff in sums.items() if diff} == expected
            plain = await elsewhere.fetch_part(sent[0])
            assert all(isinstance(update.key, dict) for update in plain)
            with pytest.raises(ap.CodecMismatch):
                await elsewhere.fetch_part(sent[0], SCHEMA)
            told = await s.stats()
            assert told.parts == len(sent) == len(s.parts())
            assert told.updates_max == sum(part.len for part in s.parts()) >= len(await s.rows())
            if bounds != "inline":
                assert told.columns["key.region"].min == "a"
                assert told.columns["key.number"].max == 7
                assert told.columns["val.amount"].null_count > 0
                assert min(part.stats["key.region"].min for part in s.parts() if part.stats) == "a"
                assert all(part.key is not None and part.encoded_size_bytes > 0 for part in s.parts())
            for garbage in (b"", b"garbage", sent[0][:-1], sent[0].replace(b" 1 ", b" 2 ", 1), 5):
                with pytest.raises(ap.InvalidUpdate, match="part"):
                    await elsewhere.fetch_part(garbage)  # type: ignore[arg-type]
        with pytest.raises(ap.InvalidUsage) as caught:
            s.parts()
        assert caught.value.kind == ap.UsageKind.CLOSED
        if bounds != "inline":
            await client.admin.force_gc("s")
            with pytest.raises(ap.LeaseExpired):
                for data in sent:
                    await elsewhere.fetch_part(data)


@pytest.mark.parametrize("bounds", ["tiny parts", "tiny row groups"])
async def test_runs_of_a_batch_whose_parts_are_passed_over(bounds: str) -> None:
    """Goal: what a condition passes over does not move where the runs of a batch begin."""
    async with client_of(bounds) as client:
        async with client.writer("t", SCHEMA) as writer, writer.builder(0) as builder:
            for part in range(6):
                await builder.extend([(f"k{key:03}", part % 2, 0, 1) for key in range(60)])
            batch = await builder.finish(1)
            assert bounds != "tiny parts" or len(batch.parts) > len(batch.runs) + 1 > 2
            await writer.compare_and_append_batch([batch], 0, 1)
        async with client.reader("t", SCHEMA) as reader, reader.snapshot() as s:
            where = (pc.field("key") >= "k017") & (pc.field("key") < "k041")
            rows = await s.rows(where)
            assert rows == [(f"k{key:03}", val, 3) for key in range(17, 41) for val in (0, 1)]
            found = [
                tuple(row.values()) for b in [b async for b in s.batches(where)] for row in b.to_pylist()
            ]
            assert found == rows


async def test_a_number_stands_for_one_column() -> None:
    """Goal: of key, val, and then the fields by their own names; never of the time or the diff."""
    async with client_of("blobs") as client:
        model = await filled(client)
        async with client.reader("s", MODELS) as reader, reader.snapshot() as s:
            assert sorted_rows(await s.rows(pc.field(2) == "a")) == sorted_rows(
                row for row in model if row[0].region == "a"
            )
            with pytest.raises(ap.InvalidUsage):
                await s.rows(pc.field(5) == 1)


async def test_conditions_that_fail_on_data() -> None:
    """Goal: an error of this library; and no row is lost where a function may make NaN of numbers."""
    schema = ap.Schema(key=str, val=float)
    async with client_of("blobs") as client:
        async with client.writer("t", SCHEMA) as writer:
            await writer.compare_and_append([("a", 1, 0, 1), ("b", 0, 0, 1)], 0, 1)
        async with client.writer("f", schema) as floats:
            await floats.compare_and_append([("a", 1.0, 0, 1), ("b", 2.0, 0, 1)], 0, 1)
        async with client.reader("t", SCHEMA) as reader, reader.snapshot() as s:
            with pytest.raises(ap.InvalidUsage, match="zero"):
                await s.rows(pc.field("val") / 0 > 1)
        async with client.reader("f", schema) as reader, reader.snapshot() as s:
            assert len(await s.rows(~(pc.field("val") < pc.sqrt(pc.scalar(-1.0))))) == 2


async def test_estimates_of_an_older_schema() -> None:
    class Later(Val):
        note: str | None = None

    async with client_of("blobs") as client:
        async with client.writer("s", MODELS):
            await client.compare_and_evolve_schema("s", 0, ap.Schema(key=Key, val=Later))
        async with client.writer("s", ap.Schema(key=Key, val=Later)) as writer:
            row = (Key(region="a", number=0), Later(amount=1, number=0.5, note="n"), 0, 1)
            await writer.compare_and_append([row], 0, 1)
        async with client.reader("s", MODELS) as reader, reader.snapshot() as s:
            told = await s.stats()
            assert (told.updates_max, told.columns["val.amount"].max) == (1, 1)
            assert "val.note" not in told.columns
            assert s.parts()[0].stats == told.columns


async def test_a_damaged_part_is_not_told_as_a_lost_lease() -> None:
    name = uuid.uuid4().hex
    blob = ap.open_blob(f"mem://{name}")
    async with client_of("tiny row groups", blob, f"mem://{name}") as client:
        await filled(client)
        async with client.reader("s", MODELS) as reader, reader.snapshot() as s:
            part = s.parts()[0]
            assert part.key is not None
            data = await blob.get(part.key)
            assert data is not None
            await blob.set(part.key, data[:100] + bytes(reversed(data[100:])))
            with pytest.raises(ap.Corruption):
                await client.workers.fetch_part(part.to_transmittable())
    await blob.aclose()


MEANINGLESS: dict[str, Any] = {
    "a naive time beside one with a zone": pc.field("val") > pa.scalar(0, pa.timestamp("us")),
    "a sum": pc.cumulative_sum(pc.field("key")) > 1,
    "no regular expression": pc.match_substring_regex(pc.field("key").cast(pa.string()), "("),
}


@pytest.mark.parametrize("where", MEANINGLESS.values(), ids=MEANINGLESS.keys())
async def test_a_condition_is_checked_where_there_are_no_rows(where: Any) -> None:
    """Goal: it means nothing for the shard, whatever is in it."""
    async with client_of("inline") as client:
        schema = ap.Schema(key=int, val=datetime.datetime)
        async with client.writer("times", schema) as writer:
            await writer.compare_and_append([], 0, 1)
        async with client.reader("times", schema) as reader, reader.snapshot() as s:
            with pytest.raises(ap.InvalidUsage) as caught:
                await s.rows(where=where)
            assert caught.value.kind is ap.UsageKind.INVALID_COLUMN


async def test_a_condition_on_long_texts_is_taken_though_it_cannot_be_written() -> None:
    """Goal: Arrow writes a list of long texts only in part, and may cut a character; what is read is so."""
    long = "\U0010ffff" * 80
    async with ap.open("mem://", settings=ap.Settings(inline_writes_single_max_bytes=0)) as client:
        w = await client.writer("t", ap.Schema(key=str, val=float))
        await w.compare_and_append([(long, 1.0, 0, 1), ("a", NAN, 0, 1)], 0, 1)
        s = await (await client.reader("t")).snapshot()
        where = pc.field("key").isin([long, long + "b"])
        assert await s.rows(where) == [(long, 1.0, 1)]
        assert len(await s.rows(where | ~(pc.field("val") > NAN))) == 2
        with pytest.raises(ap.InvalidUsage) as refused:
            await s.rows(where & pc.field("none"))
        assert refused.value.kind == ap.UsageKind.INVALID_COLUMN
