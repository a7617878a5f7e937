"""Appends with an id of `once=`, and instants of a wall clock, with one fault."""

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import aiopersist as ap
from tests.cuts.scenes import SCENES, Scene, scene
from tests.cuts.stage import NAME, Stage, Told, at, few, many
from tests.support.schemas import SCHEMA
from tests.support.shards import Call

ID = "id"


async def filled(s: Stage) -> Any:
    """A writer of a shard with a wall clock that has a history."""
    w = await s.client.writer(NAME, SCHEMA, clock="wall")
    for rows in (many("b"), few("c"), many("d")):
        await s.append(w, rows, partial(w.write, rows))
    return w


Append = Callable[[Any, list[Any]], Awaitable[Any]]


def once(begin: Callable[[Stage], Awaitable[Any]], rows: list[Any], call: Append) -> Scene:
    """Who repeats it, in this client and in a fresh one, has it once."""

    async def prepare(s: Stage) -> Call:
        w = await begin(s)
        told: list[Told] = []

        async def append() -> None:
            try:
                await s.append(w, rows, lambda: call(w, rows))
            finally:
                told.append(s.told[-1])

        async def repeat(client: Any, w: Any) -> None:
            time = await w.write(rows, once=ID)
            if told:
                told[0].happened = True
            else:  # it was cut off before
                s.told.append(Told(NAME, rows, True))
                told.append(s.told[-1])
            assert await client.happened(ID, NAME) == time == await w.write([], once=ID)

        async def afresh(client: Any) -> None:
            async with client.writer(NAME, SCHEMA) as w:
                await repeat(client, w)

        s.after.append(lambda: repeat(s.client, w))
        s.afresh.append(afresh)
        return append

    return prepare


SCENES["write_once"] = once(Stage.filled, many("x"), lambda w, rows: w.write(rows, once=ID))
SCENES["write_once_by_the_clock"] = once(filled, many("x"), lambda w, rows: w.write(rows, once=ID))
SCENES["write_few_by_the_clock"] = once(filled, few("x"), lambda w, rows: w.write(rows, once=ID))
SCENES["compare_and_append_once"] = once(
    Stage.filled, few("x"), lambda w, rows: w.compare_and_append(at(3, rows), 3, 4, once=ID)
)


async def _transmitted(w: Any, rows: list[Any]) -> None:
    """Twice, as a process does that was not told."""
    data = (await w.batch(at(3, rows), 3, 4)).to_transmittable()
    for _ in range(2):
        batch = await w.batch_from_transmittable(data)
        await w.compare_and_append_batch([batch], 3, 4, once=ID)


SCENES["transmit_and_append_once"] = once(Stage.filled, many("x"), _transmitted)


@scene
async def snapshot_at_an_instant(s: Stage) -> Call:
    """The contents at an instant that has passed stay what they were told to be."""
    w = await filled(s)
    r = await s.client.reader(NAME, SCHEMA)
    moment = datetime.fromtimestamp(s.client.clock()[0], UTC)
    told: list[Any] = []

    async def call() -> None:
        async with r.snapshot(moment, wait=False) as snapshot:
            told.append(await snapshot.rows())

    async def again(client: Any) -> None:
        try:
            async with client.reader(NAME, SCHEMA) as r, r.snapshot(moment, wait=False) as snapshot:
                told.append(await snapshot.rows())
        except ap.SinceViolation:  # others have given up the history
            return
        assert all(rows == told[0] for rows in told)

    async def written_after() -> None:
        await s.append(w, rows := few("y"), lambda: w.write(rows))
        await again(s.client)

    s.after.append(written_after)
    s.afresh.append(again)
    return call
