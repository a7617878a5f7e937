"""Goal: a shard's stored schema is shown, kept and evolved; old and new programs go on together."""

import asyncio
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from pydantic import BaseModel, ConfigDict

import aiopersist as ap
from tests.conftest import StoreUrls
from tests.support.internals import shard_of
from tests.support.schemas import V1, V2, Colour

pytestmark = pytest.mark.usefixtures("started_postgres")

OLD = ap.Schema(key=str, val=int)


class V3(BaseModel):
    name: str
    age: int | None = None
    tags: list[str] | None = None


class Required(BaseModel):
    name: str
    age: int


class Other(BaseModel):
    name: int


class Renamed(BaseModel):
    title: str | None = None


class Key(BaseModel):
    model_config = ConfigDict(frozen=True)
    id: int
    part: str


ONE, TWO, THREE = (ap.Schema(key=str, val=version) for version in (V1, V2, V3))


async def rows(client: ap.Client, schema: Any, as_of: int | None = None) -> list[Any]:
    async with client.reader("t", schema) as r, r.snapshot(as_of) as s:
        return await s.rows()


async def the_state_is_read_as_it_was_written(w: ap.WriteHandle[Any, Any], fresh: ap.Client) -> None:
    """Statistics and least keys included."""
    async with fresh.reader("t") as r:
        assert list(shard_of(r).state.batches.values()) == list(shard_of(w).state.batches.values())


# --- what a shard is stored as -------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        ap.Schema(key=bytes, val=int),
        ap.Schema(key=str, val=str),
        ap.Schema(key=str | None, val=int),
        ap.Schema(key=str, val=int | None),
        ap.Schema(key=str, val=int, time=2),
        ap.Schema(key=str, val=None),
        ap.Schema(key=str, val=pa.int32()),
        ONE,
    ],
    ids=repr,
)
async def test_another_schema_is_refused_and_nothing_is_written(other: Any) -> None:
    """Goal: with both in the error; writers, readers, and a reader that may create."""
    async with ap.open("mem://") as client, client.writer("t", OLD) as w:
        seqno = shard_of(w).state.seqno
        for opening in (
            lambda: client.writer("t", other),
            lambda: client.reader("t", other),
            lambda: client.reader("t", other, create=True),
        ):
            with pytest.raises(ap.CodecMismatch) as caught:
                await opening()
            assert caught.value.requested == other
            assert isinstance(caught.value.actual, ap.Schema)
            assert "int64" in str(caught.value)
            assert caught.value.shard_id == w.shard_id
        assert (await shard_of(w).open()).seqno == seqno


async def test_the_schema_is_told(location: StoreUrls) -> None:
    async with ap.open(blob=location.blob, consensus=location.consensus) as client:
        async with client.writer("t", ONE):
            number, schema = await client.schema("t")
        assert number == 0
        assert schema.arrow_schema == ONE.arrow_schema
    async with ap.open(blob=location.blob, consensus=location.consensus) as client:
        number, schema = await client.schema("t")
        assert (number, schema.arrow_schema) == (0, ONE.arrow_schema)
        async with client.writer("t", schema) as w:
            await w.write([("a", {"name": "x"})])
        assert await rows(client, ONE) == [("a", V1(name="x"), 1)]
        assert await rows(client, None) == [("a", {"name": "x"}, 1)]


VALUES: list[tuple[Any, Any, Any]] = [
    (bytes, b"\x00\xff", b"\x00\xff"),
    (str, "ä\0", "ä\0"),
    (int, -(2**63), -(2**63)),
    (float, 1.5, 1.5),
    (bool, True, True),
    (datetime, datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC), datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)),
    (Decimal, Decimal("1.000000001"), Decimal("1.000000001")),
    (UUID, UUID(int=7), UUID(int=7).bytes),
    (Colour, Colour.BLUE, "BLUE"),
    (list[int | None], [1, None], [1, None]),
    (str | None, None, None),
]


@pytest.mark.parametrize(("kind", "value", "plain"), VALUES, ids=[str(kind) for kind, _, _ in VALUES])
@pytest.mark.parametrize("inline", [0, 16384], ids=["blob", "inline"])
async def test_values_come_back_as_they_were(kind: Any, value: Any, plain: Any, inline: int) -> None:
    """Goal: as key and as value, inline and from a blob; without a schema as plain values. Statistics and
    the least key of a part survive the state's JSON."""
    limits = ap.Settings(inline_writes_single_max_bytes=inline)
    async with ap.open("mem://values", settings=limits) as client:
        schema = ap.Schema(key=kind, val=kind)
        async with client.writer("t", schema) as w:
            await w.compare_and_append([(value, value, 0, 1)], 0, 1)
        async with ap.open("mem://values") as fresh:
            await the_state_is_read_as_it_was_written(w, fresh)
            assert await rows(fresh, schema) == [(value, value, 1)]
            assert await rows(fresh, None) == [(plain, plain, 1)]
        await client.admin.drop("t")


async def test_unit_and_model_keys() -> None:
    async with ap.open("mem://") as client:
        schema = ap.Schema(key=Key, val=None)
        async with client.writer("t", schema) as w:
            await w.write([(Key(id=2, part="b"), None), (Key(id=1, part="z"), None)])
        assert await rows(client, schema) == [(Key(id=1, part="z"), None, 1), (Key(id=2, part="b"), None, 1)]


async def test_no_nan_is_lost_in_the_state() -> None:
    """Goal: floats that JSON has no word for, in the statistics and least key of a part."""
    limits = ap.Settings(inline_writes_single_max_bytes=0)
    schema = ap.Schema(key=float, val=float)
    for number in (float("nan"), float("inf"), -float("inf"), -0.0):
        async with ap.open(f"mem://nan{number}", settings=limits) as client:
            async with client.writer("t", schema) as w:
                await w.compare_and_append([(number, number, 0, 1)], 0, 1)
            async with ap.open(f"mem://nan{number}") as fresh:
                await the_state_is_read_as_it_was_written(w, fresh)
                (row,) = await rows(fresh, schema)
                assert repr(row) == repr((number + 0.0, number + 0.0, 1))


# --- evolution -----------------------------------------------------------------------------------


@pytest.mark.parametrize("inline", [0, 16384], ids=["blob", "inline"])
async def test_old_and_new_go_on_together(location: StoreUrls, inline: int) -> None:
    """Goal: a deployment rolls: old parts read with nulls, old readers leave new fields out, old writers'
    rows read with nulls; handles that were opened before the change, and handles that are opened after it."""
    limits = ap.Settings(inline_writes_single_max_bytes=inline)
    async with (
        ap.open(blob=location.blob, consensus=location.consensus, settings=limits) as client,
        ap.open(blob=location.blob, consensus=location.consensus, settings=limits) as elsewhere,
    ):
        before_w, before_r = await elsewhere.writer("t", ONE), await elsewhere.reader("t", ONE)
        await before_w.write([("a", V1(name="old"))])
        assert await client.compare_and_evolve_schema("t", 0, TWO) == 1
        assert await client.compare_and_evolve_schema("t", 1, THREE) == 2
        await before_w.write([("b", V1(name="old writer"))])
        async with client.writer("t", ONE) as w:
            await w.write([("c", V1(name="late old writer"))])
        async with client.writer("t", TWO) as w:
            await w.write([("d", V2(name="new", age=7))])
        async with elsewhere.writer("t", THREE) as w:
            await w.write([("e", V3(name="newest", age=8, tags=["x"]))])
        names = [("a", "old"), ("b", "old writer"), ("c", "late old writer"), ("d", "new"), ("e", "newest")]
        assert [(k, v.name) for k, v, _ in await rows(client, ONE)] == names
        assert {type(v) for _, v, _ in await rows(client, ONE)} == {V1}
        assert [v.age for _, v, _ in await rows(client, TWO)] == [None, None, None, 7, 8]
        assert [v.tags for _, v, _ in await rows(client, THREE)] == [None, None, None, None, ["x"]]
        async with before_r.snapshot() as s:
            assert [(k, v.name) for k, v, _ in await s.rows()] == names
        number, schema = await client.schema("t")
        assert (number, schema.arrow_schema) == (2, THREE.arrow_schema)
        assert (await rows(client, None))[0] == ("a", {"name": "old", "age": None, "tags": None}, 1)


async def test_what_differs_in_new_fields_only_is_one_to_an_old_reader() -> None:
    """Goal: rows that a projection makes equal are summed."""
    async with ap.open("mem://") as client, client.writer("t", ONE):
        await client.compare_and_evolve_schema("t", 0, TWO)
        async with client.writer("t", TWO) as w:
            await w.write([("a", V2(name="x", age=1)), ("a", V2(name="x", age=2))])
        assert await rows(client, ONE) == [("a", V1(name="x"), 2)]


async def test_a_stale_id_is_a_mismatch() -> None:
    async with ap.open("mem://") as client, client.writer("t", ONE):
        assert await client.compare_and_evolve_schema("t", 0, TWO) == 1
        for stale, schema in ((0, THREE), (2, THREE), (-1, TWO), (0, OLD)):
            with pytest.raises(ap.SchemaMismatch) as caught:
                await client.compare_and_evolve_schema("t", stale, schema)
            assert (caught.value.expected, caught.value.actual) == (stale, 1)
        assert (await client.schema("t"))[0] == 1


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(ap.Schema(key=str, val=Required), id="a_required_field"),
        pytest.param(ap.Schema(key=str, val=Other), id="another_type"),
        pytest.param(ap.Schema(key=str, val=Renamed), id="a_field_gone"),
        pytest.param(ap.Schema(key=bytes, val=V2), id="another_key"),
        pytest.param(ap.Schema(key=str, val=V2 | None), id="nullable"),
        pytest.param(ap.Schema(key=str, val=V2, time=2), id="another_time"),
        pytest.param(OLD, id="no_struct"),
    ],
)
async def test_anything_but_optional_fields_is_incompatible(schema: Any) -> None:
    async with ap.open("mem://") as client, client.writer("t", ONE) as w:
        with pytest.raises(ap.IncompatibleSchema):
            await client.compare_and_evolve_schema("t", 0, schema)
        assert (await client.schema("t"))[0] == 0
        await w.write([("a", V1(name="x"))])


async def test_evolutions_that_race() -> None:
    """Goal: of several at the same moment one wins; the same one twice is one."""
    async with ap.open("mem://race") as one, ap.open("mem://race") as two, one.writer("t", ONE):
        results = await asyncio.gather(
            *(client.compare_and_evolve_schema("t", 0, TWO) for client in (one, two, one, two)),
            return_exceptions=True,
        )
        assert 1 in results
        assert all(r == 1 or isinstance(r, ap.SchemaMismatch) for r in results)
        assert (await one.schema("t"))[0] == 1


async def test_the_same_schema_again_changes_nothing() -> None:
    async with ap.open("mem://") as client, client.writer("t", ONE) as w:
        seqno = shard_of(w).state.seqno
        assert await client.compare_and_evolve_schema("t", 0, ONE) == 0
        assert (await shard_of(w).open()).seqno == seqno


async def test_a_flush_merges_parts_of_several_schemas() -> None:
    """Goal: inline parts of old and new writers become one blob that reads as they did."""
    limits = ap.Settings(inline_writes_single_max_bytes=500, inline_writes_total_max_bytes=2500)
    async with ap.open("mem://", settings=limits) as client:
        old = await client.writer("t", ONE)
        await client.compare_and_evolve_schema("t", 0, TWO)
        new = await client.writer("t", TWO)
        for n in range(12):
            await old.write([(f"{n:02}a", V1(name="old"))])
            await new.write([(f"{n:02}b", V2(name="new", age=n))])
        state = shard_of(old).state
        assert any(part.key for batch in state.batches.values() for part in batch.parts)
        found = await rows(client, TWO)
        assert [v.age for _, v, _ in found] == [age for n in range(12) for age in (None, n)]
