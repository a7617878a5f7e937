"""Goal: whatever was appended, compacted and collected, in whatever parts, engines show the contents at the
time of the publication, on every path of the code."""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import aiopersist as ap
from tests.iceberg.kit import assert_shows, contents

KEYS = st.sampled_from(["a", "b", "c", "d\0", "ä"])
VALS = st.sampled_from([0.0, -0.0, 1.5, float("nan"), float("-inf"), None])
UPDATES = st.lists(st.tuples(KEYS, VALS, st.integers(1, 3), st.sampled_from([1, 1, 1, 2, 3])), max_size=12)
SCHEMA: Any = ap.Schema(str, float | None)


STEPS = st.lists(
    st.fixed_dictionaries(
        {
            "updates": UPDATES,
            "retracts": st.floats(0, 1),
            "span": st.integers(1, 4),
            "way": st.sampled_from(["append", "append", "truncated", "rewritten"]),
            "after": st.sampled_from([None, None, None, "compact", "collect", "publish"]),
        }
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@given(
    steps=STEPS,
    inline=st.sampled_from([0, 0, 200]),
    memory=st.sampled_from([16, 16 * 400, 2**28]),
    row_group=st.sampled_from([1, 64, 2**20]),
    data=st.data(),
)
async def test_engines_show_the_contents(
    steps: list[dict[str, Any]], inline: int, memory: int, row_group: int, data: Any
) -> None:
    limits = ap.Settings(
        inline_writes_single_max_bytes=inline, compaction_memory_bytes=memory, row_group_bytes=row_group
    )
    with TemporaryDirectory() as folder:
        async with ap.open(Path(folder), settings=limits, maintenance=False) as client:
            upper = await _play(client, steps)
            since = (await client.admin.inspect("t")).since.elements[0]
            as_of = data.draw(st.integers(since, upper - 1), "as_of")
            published = await client.publish("t", as_of=as_of)
            expected = await contents(client, as_of=as_of)
            assert published.rows == expected.total()
            assert_shows(published.metadata, expected)


async def _play(client: ap.Client, steps: list[dict[str, Any]]) -> int:
    """Append all steps. Retractions are of rows that are there."""
    present: Counter[Any] = Counter()
    upper = 0
    async with client.writer("t", SCHEMA) as writer:
        for step in steps:
            end = upper + step["span"]
            within = step["span"] - 1
            rows = [(k, v, upper + min(at, within), n) for k, v, at, n in step["updates"]]
            gone = sorted(present, key=repr)[: round(step["retracts"] * len(present))]
            rows += [(k, _value(v), end - 1, -present[k, v]) for k, v in gone]
            await _append(writer, rows, upper, end, step["way"])
            for k, v in gone:
                del present[k, v]
            for k, v, _, n in step["updates"]:
                present[k, _name(v)] += n
            upper = end
            await _afterwards(client, step["after"])
    return upper


async def _append(writer: Any, rows: list[Any], lower: int, upper: int, way: str) -> None:
    if way == "append":
        await writer.compare_and_append(rows, lower, upper)
        return
    if way == "rewritten":
        batch = await writer.batch([(k, v, lower, n) for k, v, _, n in rows], lower, lower + 1)
        batch.rewrite_ts(upper - 1, upper)
    else:
        outside = [("outside", 1.0, upper, 1), ("outside", 2.0, upper + 1, -1)]
        batch = await writer.batch([*rows, *outside], lower, upper + 2)
    await writer.compare_and_append_batch([batch], lower, upper)


async def _afterwards(client: ap.Client, what: str | None) -> None:
    if what == "publish":
        await client.publish("t", keep=1)
    if what in ("compact", "collect"):
        await client.admin.force_compaction("t")
    if what == "collect":
        await client.admin.force_gc("t")


def _name(value: float | None) -> str:
    """Equal for values that are stored as one."""
    return repr(value + 0.0 if value is not None else None)


def _value(name: str) -> float | None:
    return None if name == "None" else float(name)
