"""Sharing, waiting, large heads; see `test_register.py`."""

import asyncio
import json
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.shard.log import consensus_key
from aiopersist.state.diff import Changes, decode_commit, decode_diff, diff_of, encode_diff
from aiopersist.testing.faults import Outcome
from tests.shard.register_kit import Place
from tests.support.schemas import SCHEMA

# --- sharing, waiting ---------------------------------------------------------------------------------


async def test_lost_hints_cost_latency_only(place: Place) -> None:
    place.faults.losing_hints = True
    async with (
        place.open(watch_timeout_s=0.1) as client,
        place.open() as other,
        client.writer("t", SCHEMA) as w,
        other.writer("t", SCHEMA) as there,
    ):
        waiting = [asyncio.create_task(w.wait_for_upper_past(n)) for n in range(3)]
        await asyncio.sleep(0.05)
        await there.compare_and_append([], 0, 9)
        async with asyncio.timeout(50):
            await asyncio.gather(*waiting)


async def test_a_hint_that_fails_is_asked_for_again(place: Place) -> None:
    """Goal: a store whose `watch` fails for good serves waiters by looking."""
    place.faults.fail_next("watch", Outcome.REFUSED, 10**6)
    async with (
        place.open(watch_timeout_s=0.1, retry_timeout_s=0.05) as client,
        client.writer("t", SCHEMA) as w,
        client.writer("t", SCHEMA) as other,
    ):
        for upper in range(3):
            try:
                async with asyncio.timeout(0.3):
                    await w.wait_for_upper_past(upper)
            except (TimeoutError, ap.StorageUnavailable):
                pass
        place.faults.heal()
        waiting = asyncio.create_task(w.wait_for_upper_past(0))
        await asyncio.sleep(0.2)
        await other.compare_and_append([], 0, 1)
        async with asyncio.timeout(50):
            await waiting


async def test_readers_of_a_head_share_requests(place: Place) -> None:
    """Goal: a hundred callers at the same moment cost two reads, and each sees every version that was written
    before it asked."""
    async with place.open(maintenance=False) as client, client.writer("t", SCHEMA) as w:
        place.faults.latency_s = (0.01, 0.01)
        before = place.faults.calls["head"]
        first = asyncio.create_task(w.fetch_recent_upper())
        await asyncio.sleep(0.002)
        async with (
            ap.open(blob=place.blob, consensus=place.consensus, maintenance=False) as direct,
            direct.writer("t", SCHEMA) as other,
        ):
            await other.compare_and_append([], 0, 7)
        uppers = await asyncio.gather(*(w.fetch_recent_upper() for _ in range(100)))
        await first
        assert set(uppers) == {ap.Antichain(7)}
        assert place.faults.calls["head"] - before <= 4


async def test_a_failed_read_is_told_to_those_who_asked_only(place: Place) -> None:
    async with place.open(maintenance=False, retry_timeout_s=0.0) as client, client.writer("t", SCHEMA) as w:
        place.faults.fail_next("head", Outcome.REFUSED)
        results = await asyncio.gather(*(w.fetch_recent_upper() for _ in range(3)), return_exceptions=True)
        assert any(isinstance(r, ap.StorageUnavailable) for r in results)
        assert await w.fetch_recent_upper() == ap.Antichain(0)


# --- large heads --------------------------------------------------------------------------------------


async def test_a_head_that_is_known_is_not_decoded(place: Place, monkeypatch: Any) -> None:
    """Goal: a look at a shard whose newest version is large costs no more than at any other."""
    async with place.open(maintenance=False, inline_writes_single_max_bytes=10**6) as client:
        async with client.writer("t", SCHEMA) as w:
            await w.compare_and_append([(f"{i:0200}", i, 0, 1) for i in range(500)], 0, 1)
            head = await place.consensus.head(consensus_key(w.shard_id))
            assert head is not None and len(head.data) > 10_000
            decoded: list[int] = []

            def counted(data: bytes) -> Any:
                decoded.append(len(data))
                return decode_diff(data)

            for module in ("aiopersist.state.seal", "aiopersist.state.diff"):
                monkeypatch.setattr(f"{module}.decode_diff", counted)
            for _ in range(3):
                assert await w.fetch_recent_upper() == ap.Antichain(1)
            assert decoded == []


@pytest.mark.parametrize("commit", ["ab12", "é" * 100], ids=["as ours are", "strange"])
def test_the_commit_id_at_the_beginning_is_that_of_the_whole(commit: str) -> None:
    diff = diff_of(Changes(), None, commit=commit, at=1.5)
    spaced = json.dumps(json.loads(encode_diff(diff)), indent=100).encode()
    turned = json.dumps(dict(reversed(json.loads(encode_diff(diff)).items()))).encode()
    for data in (encode_diff(diff), spaced, turned):
        assert decode_commit(data) == decode_diff(data).commit == commit


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[1, 2]", b'{"commit": "a"}', b'{"format": 999, "commit": "a"}', b"\xff" * 300]
)
def test_no_commit_id_is_found_in_what_is_no_version(data: bytes) -> None:
    with pytest.raises(ap.Corruption):
        decode_commit(data)
