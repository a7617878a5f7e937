"""Goal: every call that changes an `Indexed` happens as a whole or not at all, takes its seqno in its
turn, shares commits with calls that arrive beside it, and names stream and frontier in a refusal."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import pytest

import aiopersist as ap
from aiopersist.indexed import Indexed, Refused, UnknownStream
from tests.indexed.indexed_calls_kit import at, commits, parts_below, read, two

OTHER_CODECS = [(bytes, int), (str, float), (str, int | None), (str | None, int), (int, str)]


class Destroyed(NamedTuple):
    id: str
    call: Callable[[Indexed, Any], Awaitable[Any]]
    refused: bool = False


ON_DESTROYED = [
    Destroyed("write", lambda ix, s: ix.write([(s, at(5))]), True),
    Destroyed("write nothing", lambda ix, s: ix.write([(s, [])]), True),
    Destroyed("seal", lambda ix, s: ix.seal([s], 5), True),
    Destroyed("allow_compaction", lambda ix, s: ix.allow_compaction([(s, 5)]), True),
    Destroyed("description", lambda ix, s: ix.description(s.name)),
    Destroyed("snapshot", lambda ix, s: ix.snapshot(s)),
    Destroyed("listen", lambda ix, s: ix.listen(s)),
    Destroyed("inspect", lambda ix, s: ix.inspect(s)),
]


# --- register, load, description ----------------------------------------------------------------------


async def test_a_new_stream_begins_at_zero_and_empty(client: ap.Client) -> None:
    async with client.indexed("ix", background=False) as ix:
        stream = await ix.register("a", str, int)
        assert stream.name == "a"
        found = await ix.description("a")
        assert found == ap.Description(ap.Antichain(0), ap.Antichain(0), ap.Antichain(0))
        async with await ix.snapshot(stream) as snapshot:
            frontiers = (snapshot.since, snapshot.seal)
            assert (snapshot.seqno, *frontiers) == (0, ap.Antichain(0), ap.Antichain(0))
            assert await snapshot.rows() == []


async def test_registering_again_loads_without_a_commit_or_a_seqno(mem: ap.Client, ix: Indexed) -> None:
    stream = await ix.register("a", str, int)
    await ix.write([(stream, at(3))])
    await ix.seal([stream], 2)
    before = commits(mem)
    again, loaded = await ix.register("a", str, int), await ix.load("a", str, int)
    assert commits(mem) == before
    assert loaded is not None
    for handle in (again, loaded):
        assert await read(ix, handle) == [("k", 3, 3, 1)]
        assert (await ix.description("a")).upper == ap.Antichain(2)
    assert await ix.write([(again, at(4)), (loaded, at(5))]) == 3


async def test_streams_outlive_their_instance(client: ap.Client, location: Any) -> None:
    async with client.indexed("ix", background=False) as ix:
        a, b = await two(ix)
        await ix.write([(a, at(7, 1)), (b, at(5))])
        await ix.seal([a], 3)
        await ix.allow_compaction([(a, 2)])
        await ix.destroy("b")
    async with (
        ap.open(blob=location.blob, consensus=location.consensus) as other,
        other.indexed("ix", background=False) as ix,
    ):
        loaded = await ix.load("a", str, int)
        assert loaded is not None
        assert await read(ix, loaded) == [("k", 1, 2, 1), ("k", 7, 7, 1)]
        assert await ix.description("a") == ap.Description(0, 3, 2)
        assert await ix.destroy("b") is False
        with pytest.raises(UnknownStream):
            await ix.register("b", str, int)
        assert await ix.write([(loaded, at(3))]) == 4


async def test_loading_an_unknown_name_creates_nothing(mem: ap.Client, ix: Indexed) -> None:
    before = commits(mem)
    assert await ix.load("a", str, int) is None
    assert commits(mem) == before
    with pytest.raises(UnknownStream, match="'a'"):
        await ix.description("a")
    assert ix.counters()["streams"] == 0


@pytest.mark.parametrize("call", ["register", "load"])
@pytest.mark.parametrize("codecs", OTHER_CODECS, ids=str)
async def test_other_codecs_are_a_mismatch_that_shows_both(ix: Indexed, call: str, codecs: Any) -> None:
    await ix.register("a", str, int)
    with pytest.raises(ap.CodecMismatch) as caught:
        await getattr(ix, call)("a", *codecs)
    assert caught.value.requested.same_as(ap.Schema(*codecs))
    assert caught.value.actual.same_as(ap.Schema(str, int))


@pytest.mark.parametrize("call", ["register", "load"])
@pytest.mark.parametrize("codecs", [(str, int), (bytes, float)], ids=str)
async def test_a_destroyed_name_is_unknown_whatever_the_codecs(ix: Indexed, call: str, codecs: Any) -> None:
    await ix.register("a", str, int)
    await ix.destroy("a")
    with pytest.raises(UnknownStream, match="'a'"):
        await getattr(ix, call)("a", *codecs)


@pytest.mark.parametrize("call", ["register", "load", "destroy", "description", "inspect"])
@pytest.mark.parametrize("name", ["", "x" * 513, None, 5, b"a"], ids=repr)
async def test_names_that_cannot_be_are_refused(ix: Indexed, call: str, name: Any) -> None:
    arguments = (name, str, int) if call in ("register", "load") else (name,)
    with pytest.raises(ap.InvalidUsage) as caught:
        await getattr(ix, call)(*arguments)
    assert caught.value.kind is ap.UsageKind.INVALID_NAME


async def test_what_cannot_be_stored_is_a_type_error(ix: Indexed) -> None:
    with pytest.raises(TypeError):
        await ix.register("a", object, int)
    assert await ix.load("a", str, int) is None


async def test_tasks_that_register_one_name_agree(mem: ap.Client, ix: Indexed) -> None:
    """The first one decides the codecs; it is one commit."""
    before = commits(mem)
    codecs = [int, int, float, int, float]
    found = await asyncio.gather(*[ix.register("a", str, val) for val in codecs], return_exceptions=True)
    assert [isinstance(f, ap.CodecMismatch) for f in found] == [val is float for val in codecs]
    assert commits(mem) - before == 1
    assert ix.counters()["streams"] == 1


async def test_two_indexed_and_a_shard_of_one_name_are_three_things(mem: ap.Client, ix: Indexed) -> None:
    await mem.writer("ix", ap.Schema(str, int))
    async with mem.indexed("other", background=False) as other:
        mine, theirs = await ix.register("a", str, int), await other.register("a", str, int)
        await ix.write([(mine, at(1))])
        assert await read(other, theirs) == []
        assert await other.write([(theirs, at(2))]) == 1
    assert list(await mem.list_shards()) == ["ix"]
    assert await read(ix, mine) == [("k", 1, 1, 1)]


@pytest.mark.parametrize("name", ["", None, 7, "x" * 513], ids=repr)
async def test_an_indexed_has_a_name_like_a_shard(mem: ap.Client, name: Any) -> None:
    with pytest.raises(ap.InvalidUsage) as caught:
        await mem.indexed(name)
    assert caught.value.kind is ap.UsageKind.INVALID_NAME


async def test_description_is_of_what_is_durable(ix: Indexed) -> None:
    a, _ = await two(ix)
    await ix.seal([a], 9)
    await ix.allow_compaction([(a, 12)])
    found = await ix.description("a")
    assert (found.lower, found.upper, found.since) == (ap.Antichain(0), ap.Antichain(9), ap.Antichain(12))


# --- destroy ------------------------------------------------------------------------------------------


async def test_destroying_is_true_once(ix: Indexed) -> None:
    await two(ix)
    assert await ix.destroy("a") is True
    assert await ix.destroy("a") is False
    with pytest.raises(UnknownStream, match="'never'"):
        await ix.destroy("never")
    found = await asyncio.gather(*[ix.destroy("b") for _ in range(5)])
    assert sorted(found) == [False] * 4 + [True]


async def test_destroying_takes_no_seqno(ix: Indexed) -> None:
    a, b = await two(ix)
    assert await ix.write([(a, at(1)), (b, at(1))]) == 1
    await ix.destroy("a")
    await ix.destroy("a")
    await ix.register("c", str, int)
    assert await ix.write([(b, at(2))]) == 2


@pytest.mark.parametrize("case", ON_DESTROYED, ids=lambda case: case.id)
async def test_calls_on_a_destroyed_stream(ix: Indexed, case: Destroyed) -> None:
    """They fail as on one that was never registered."""
    a, b = await two(ix)
    await ix.destroy("a")
    if not case.refused:
        with pytest.raises(UnknownStream, match="'a'"):
            await case.call(ix, a)
        return
    with pytest.raises(Refused) as caught:
        await case.call(ix, a)
    error = caught.value
    assert (error.seqno, error.stream, error.time, error.frontier) == (1, "a", None, None)
    assert await ix.write([(b, at(1))]) == 2


async def test_a_handle_of_another_indexed_is_an_unknown_stream(mem: ap.Client, ix: Indexed) -> None:
    async with mem.indexed("other", background=False) as other:
        stranger = await other.register("stranger", str, int)
    with pytest.raises(Refused) as caught:
        await ix.write([(stranger, at(1))])
    assert (caught.value.stream, caught.value.time, caught.value.frontier) == ("stranger", None, None)
    with pytest.raises(UnknownStream):
        await ix.snapshot(stranger)
    with pytest.raises(UnknownStream):
        await ix.listen(stranger)


async def test_what_is_called_before_a_destroy_is_in_and_what_comes_after_is_refused(ix: Indexed) -> None:
    a, b = await two(ix)
    _, listener = await ix.listen(a)
    found = await asyncio.gather(
        ix.write([(a, at(1)), (b, at(1))]),
        ix.destroy("a"),
        ix.write([(a, at(2)), (b, at(2))]),
        ix.write([(b, at(3))]),
        return_exceptions=True,
    )
    assert [found[0], found[1], found[3]] == [1, True, 3]
    assert isinstance(found[2], Refused) and (found[2].seqno, found[2].stream) == (2, "a")
    assert await read(ix, b) == [("k", 1, 1, 1), ("k", 3, 3, 1)]
    async with asyncio.timeout(50):
        told = [item async for item in listener]
    assert [item.updates.rows() for item in told] == [at(1)]


async def test_the_blobs_of_a_destroyed_stream_are_reclaimed_but_those_of_a_snapshot_stay() -> None:
    options = ap.Settings(inline_writes_single_max_bytes=0, rollup_every=2, blob_cache_bytes=0)
    url = f"mem://{uuid.uuid4().hex}"
    async with ap.open(url, settings=options) as client, client.indexed("ix", background=False) as ix:
        a, b = await two(ix)
        for t in range(3):
            await ix.write([(a, at(t)), (b, at(t))])
        snapshot = await ix.snapshot(a)
        await ix.destroy("a")
        for _ in range(6):
            await ix.seal([b], 0)
            await ix.step()
        assert sorted(await snapshot.rows()) == at(0, 1, 2)
        assert await parts_below(url) == 6
        await snapshot.aclose()
        for _ in range(8):
            await ix.seal([b], 0)
            await ix.step()
        assert await parts_below(url) == 3
        assert await read(ix, b) == at(0, 1, 2)
