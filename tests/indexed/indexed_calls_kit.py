"""Helpers that the tests of the calls of an `Indexed` share."""

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import aiopersist as ap
from aiopersist.indexed import Indexed, Stream
from aiopersist.testing.faults import Faults


async def two(ix: Indexed) -> tuple[Stream[str, int], Stream[str, int]]:
    return await ix.register("a", str, int), await ix.register("b", str, int)


def at(*times: int, key: str = "k") -> list[tuple[str, int, int, int]]:
    """An update at each of these times."""
    return [(key, time, time, 1) for time in times]


async def read(ix: Indexed, stream: Stream[Any, Any]) -> list[Any]:
    async with await ix.snapshot(stream) as snapshot:
        return sorted(tuple(row) for row in await snapshot.rows())


async def last_seqno(ix: Indexed, stream: Stream[Any, Any]) -> int:
    async with await ix.snapshot(stream) as snapshot:
        return snapshot.seqno


def commits(client: ap.Client) -> int:
    return client.metrics["consensus.compare_and_set"].count


class Faulty(NamedTuple):
    client: ap.Client
    faults: Faults
    url: str


async def parts_below(url: str) -> int:
    return len([key async for key, _ in ap.open_blob(url).list("") if key.endswith(".parquet")])


OTHER_CALLS: dict[str, Callable[[Indexed, Any], Awaitable[Any]]] = {
    "register": lambda ix, a: ix.register("new", str, int),
    "load": lambda ix, a: ix.load("a", str, int),
    "destroy": lambda ix, a: ix.destroy("a"),
    "description": lambda ix, a: ix.description("a"),
    "snapshot": lambda ix, a: ix.snapshot(a),
    "listen": lambda ix, a: ix.listen(a),
    "inspect": lambda ix, a: ix.inspect(a),
    "step": lambda ix, a: ix.step(),
    "apply": lambda ix, a: ix.apply("a", RuntimeError()),
}


READONLY: dict[str, Callable[[Indexed, Any], Awaitable[Any]]] = {
    "register": lambda ix, a: ix.register("a", str, int),
    "register new": lambda ix, a: ix.register("new", str, int),
    "destroy": lambda ix, a: ix.destroy("a"),
    "write": lambda ix, a: ix.write([(a, at(9))]),
    "write nothing": lambda ix, a: ix.write([]),
    "seal": lambda ix, a: ix.seal([a], 9),
    "allow_compaction": lambda ix, a: ix.allow_compaction([(a, 9)]),
    "step": lambda ix, a: ix.step(),
    "apply": lambda ix, a: ix.apply("a", RuntimeError()),
}
