"""Goal: `fsck` of an `Indexed` is content with what its own work leaves, and names each part that is damaged
or breaks a promise of its batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiopersist as ap
from aiopersist.state.model import State

BLOBS = ap.Settings(inline_writes_single_max_bytes=0)
NAMES = ("late", "steady")


async def fill(client: ap.Client, *, compacted: bool = False) -> None:
    """Two streams: traces of several batches, and unsealed updates in no order."""
    async with client.indexed("ix", background=False) as ix:
        late, steady = [await ix.register(name, str, int) for name in NAMES]
        for time in range(6):
            rows = [(f"k{n % 3}", n, time + n % 2, 1) for n in reversed(range(10))]
            await ix.write([(late, rows), (steady, [("x", time, time, 2)])])
            await ix.seal([steady], time + 1)
        await ix.seal([late], 3)
        for _ in range(3):
            await ix.step()
        if compacted:
            await ix.allow_compaction([(steady, 5), (late, 2)])
            while requests := await ix.step():
                for request in requests:
                    await ix.apply(request.stream, await ix.compact(request))


@pytest.mark.parametrize("settings", [BLOBS, ap.Settings()], ids=["in blobs", "inline"])
@pytest.mark.parametrize("compacted", [False, True])
async def test_it_is_sound(settings: ap.Settings, compacted: bool) -> None:
    async with ap.open("mem://", settings=settings, maintenance=False) as client:
        await fill(client, compacted=compacted)
        report = await client.admin.fsck("ix")
        async with client.indexed("ix", background=False) as ix:
            views = [await ix.inspect(name) for name in NAMES]
        assert report.problems == []
        assert report.parts > 3
        assert sum(updates for view in views for *_, updates in view.trace) < report.updates


async def test_each_damaged_blob_is_named(tmp_path: Path) -> None:
    async with ap.open(tmp_path, settings=BLOBS, maintenance=False) as client:
        await fill(client)
        parts = (await client.admin.fsck("ix")).parts
        told = []
        for file in tmp_path.rglob("*.parquet"):
            data = file.read_bytes()
            for damage in (data[:10] + bytes([data[10] ^ 1]) + data[11:], None):
                file.unlink() if damage is None else file.write_bytes(damage)
                report = await client.admin.fsck("ix")
                told += [(file.name, problem) for problem in report.problems]
                assert report.parts == parts - len(report.problems)
            file.write_bytes(data)
        assert len(told) == 2 * parts
        assert all(name in problem for name, problem in told)
        kinds = {f"{kind} of stream {name!r}" for kind in ("trace batch", "unsealed batch") for name in NAMES}
        found = {
            f"{kind} of stream {name!r}"
            for _, problem in told
            for kind in ("trace batch", "unsealed batch")
            for name in NAMES
            if kind in problem and f"of stream {name!r}" in problem
        }
        assert found == kinds - {"unsealed batch of stream 'steady'"}


def _other_streams(state: State, change: Callable[[Any], Any]) -> State:
    assert state.streams is not None
    arrangements = {name: change(arrangement) for name, arrangement in state.streams.arrangements.items()}
    return state.replace(streams=state.streams.replace(arrangements=arrangements))


def _moved(arrangement: Any) -> Any:
    """Each unsealed batch says times that it does not have."""
    unsealed = {
        at: batch.replace(time_least=batch.time_greatest) for at, batch in arrangement.unsealed.items()
    }
    return arrangement.replace(unsealed=unsealed)


def _fewer(arrangement: Any) -> Any:
    trace = {at: batch.replace(updates=batch.updates + 1) for at, batch in arrangement.trace.items()}
    return arrangement.replace(trace=trace)


def _backwards(arrangement: Any) -> Any:
    """The trace names parts of updates that have no order."""
    (first, *_), (batch, *_) = arrangement.trace.values(), arrangement.unsealed.values() or [None]
    if batch is None:
        return arrangement
    rows = sum(part.rows for part in batch.parts)
    trace = {first.lower: first.replace(parts=batch.parts, updates=rows, upper=100)}
    return arrangement.replace(trace=trace, unsealed={})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (_moved, "it has times before its lower {6}"),
        (_fewer, "has parts of 25 updates, but should have 26"),
        (_backwards, "its rows are not sorted and consolidated"),
    ],
)
async def test_a_broken_promise_is_told(
    change: Callable[[Any], Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aiopersist.maintenance import fsck

    checked = fsck._checked
    monkeypatch.setattr(fsck, "_checked", lambda shard, state: checked(shard, _other_streams(state, change)))
    async with ap.open("mem://", maintenance=False) as client:
        await fill(client)
        problems = (await client.admin.fsck("ix")).problems
        assert [told for told in problems if problem in told], problems
