"""Helpers that the tests of shared reads share."""

import random
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

from pydantic import BaseModel

import aiopersist as ap
from aiopersist.testing.model import Model, comparable, summed
from tests.support.schemas import NAN, SCHEMA, Key, Val

TASKS = [1, 12]


TINY: dict[str, Any] = {"blob_target_size": 2000, "row_group_bytes": 500, "blob_cache_bytes": 0}


LAYOUTS: dict[str, dict[str, Any]] = {
    "inline": {},
    "blobs": {**TINY, "inline_writes_single_max_bytes": 0},
    "both": {**TINY, "inline_writes_single_max_bytes": 1200},
    "one part": {"inline_writes_single_max_bytes": 0, "row_group_bytes": 300},
}


class Holder(BaseModel, frozen=True):
    key: Key | None
    last: int


def told(rows: Any) -> list[Any]:
    """Rows as they are compared: the last column is an int, and so is the time."""
    return [(comparable(key), comparable(val), *rest) for key, val, *rest in rows]


def contents(model: Model, as_of: Any, keep: Callable[..., bool] = lambda key, val: True) -> list[Any]:
    return told(row for row in model.contents(as_of) if keep(row[0], row[1]))


def changes(
    model: Model, start: int, end: int, keep: Callable[..., bool] = lambda key, val: True
) -> list[Any]:
    wanted = ((k, [v, t], d) for k, v, t, d in model.updates if start <= t < end and keep(k, v))
    return told((key, val, time, diff) for key, (val, time), diff in summed(wanted))


async def rows_of(client: ap.Client, piece: bytes, where: Any = None) -> list[Any]:
    found = []
    async for batch in client.workers.read_piece(piece, where):
        assert batch.num_rows
        found += list(zip(*(batch.column(name).to_pylist() for name in batch.schema.names), strict=True))
    return told(found)


async def read(client: ap.Client, pieces: list[bytes], where: Any = None) -> list[Any]:
    """All pieces, one after the other, read in any order."""
    found: dict[int, list[Any]] = {}
    for number in random.Random(len(pieces)).sample(range(len(pieces)), len(pieces)):
        found[number] = await rows_of(client, pieces[number], where)
    return [row for number in range(len(pieces)) for row in found[number]]


async def all_read(client: ap.Client, reader: ap.Client, expected: list[Any], **asked: Any) -> None:
    """By any number of tasks; planned by one client, read by another."""
    async with client.workers.shared_read("t", **asked) as shared:
        for tasks in TASKS:
            pieces = await shared.pieces(tasks)
            assert (await read(reader, pieces)) == expected, (asked, tasks, len(pieces))


Pool = list[Any]


async def filled(
    client: ap.Client,
    schema: Any,
    keys: Pool,
    vals: Pool,
    *,
    seed: int = 0,
    appends: int = 5,
    rows: int = 30,
    compacting: bool = True,
) -> Model:
    """Random updates, which meet and cancel; since moves to 1, and some of it is compacted there."""
    chance, model = random.Random(seed), Model()
    async with client.writer("t", schema) as w:
        for start in range(0, 2 * appends, 2):
            updates = []
            for _ in range(rows):
                key, val, diff = chance.choice(keys), chance.choice(vals), chance.choice([1, 1, 2, -1])
                updates.append((key, val, start + chance.randrange(2), diff))
            updates += [
                (k, v, start + 1, -d) for k, v, _, d in chance.sample(model.updates, len(model.updates) // 4)
            ]
            await w.compare_and_append(updates, start, start + 2)
            model.append(updates, [start], [start + 2])
            if compacting and start == 4:
                async with client.critical_since("t", "c") as since:
                    await since.compare_and_downgrade_since(0, 0, 1)
                await client.admin.force_compaction("t")
    return model


AT = datetime(2024, 10, 27, 0, 30, tzinfo=UTC)  # half an hour before clocks are put back in Berlin


KINDS: dict[str, tuple[Any, Pool, Pool]] = {
    "str": (SCHEMA, [f"k{n:03}" for n in range(60)] + ["", "ä", "\U0010ffff", "z"], list(range(4))),
    "long str": (SCHEMA, ["x" * 300 + str(n) for n in range(20)] + ["x" * 256, "\U0010ffff" * 90], [1, 2]),
    "bytes": (
        ap.Schema(key=bytes, val=bytes),
        [b"", b"\x00", b"\xff", b"\xff" * 300, b"a" * 300, *(bytes([n, 255 - n]) for n in range(0, 256, 5))],
        [b"", b"\x00\xff", b"v"],
    ),
    "int": (ap.Schema(key=int, val=str), [-(2**63), 2**63 - 1, *range(-40, 40)], ["a", "b", ""]),
    "bool": (ap.Schema(key=bool, val=int), [True, False], list(range(50))),
    "float": (
        ap.Schema(key=float, val=float),
        [NAN, float("inf"), float("-inf"), 0.0, 1e-320, *(n / 3 for n in range(-20, 20))],
        [NAN, 0.0, float("-inf"), 2.5],
    ),
    "mostly nan": (ap.Schema(key=float, val=int), [NAN] * 30 + [1.0, 2.0], list(range(40))),
    "optional": (ap.Schema(key=int | None, val=str | None), [None] * 20 + list(range(30)), [None, "a", "b"]),
    "struct": (
        ap.Schema(key=Key, val=Val),
        [Key(region=r, number=n) for r in ("a", "b", "c") for n in (None, *range(12))],
        [Val(amount=a, number=n) for a in (None, 1, 2) for n in (NAN, 0.5)],
    ),
    "optional struct": (
        ap.Schema(key=Holder, val=Val | None),
        [Holder(key=k, last=n) for k in (None, Key(region="a", number=None)) for n in range(20)],
        [None, Val(amount=None, number=1.0)],
    ),
    "no key": (ap.Schema(key=None, val=int), [None], list(range(80))),
    "no val": (ap.Schema(key=str, val=None), [f"k{n:03}" for n in range(80)], [None]),
    "list": (
        ap.Schema(key=list[int], val=int),
        [[], [1], [1, 2], [2], *([n, -n] for n in range(40))],
        [1, 2],
    ),
    "list val": (ap.Schema(key=int, val=list[str]), [1, 1, 1, 2], [[], ["a"], ["a", "b"], ["b"]]),
    "date": (
        ap.Schema(key=date, val=date),
        [date(1, 1, 1), date(9999, 12, 31), date(2024, 2, 29)],
        [date.max],
    ),
    "datetime": (ap.Schema(key=datetime, val=int), [AT + timedelta(minutes=n) for n in range(60)], [1, 2]),
    "decimal": (
        ap.Schema(key=Decimal, val=int),
        [Decimal(n) / 8 for n in range(-30, 30)] + [Decimal(10) ** 20],
        [1, 2],
    ),
    "hot": (SCHEMA, ["hot"] * 40 + ["a", "b", "x", "y"], list(range(200))),
    "two hot": (ap.Schema(key=int, val=str), [5] * 20 + [6] * 20 + [1, 9], [f"{n:03}" for n in range(60)]),
    "one row": (SCHEMA, ["only"], [1]),
}


async def ten_times(client: ap.Client, name: str = "t") -> Model:
    model = Model()
    rows = [(f"k{n:03}", t, t, 1) for t in range(10) for n in range(20)]
    async with client.writer(name, SCHEMA) as w:
        await w.compare_and_append(rows, 0, 10)
    model.append(rows, [0], [10])
    return model


async def move_since(client: ap.Client, to: Any, name: str = "t") -> None:
    async with client.critical_since(name, "c") as since:
        await since.compare_and_downgrade_since(0, 0, to)
