"""A world that goes on from a location of the last release, and what that has."""

import json
import sqlite3
from functools import cache
from pathlib import Path
from typing import Any

import aiopersist as ap
from aiopersist.storage.memory import _Log
from aiopersist.testing.simulation import World
from tests.compatibility.write import PRICES
from tests.worlds.scene import Scene

OLD = Path(__file__).parents[1] / "compatibility" / ap.__version__
STAGED = 1607  # bytes of the batch that the last release built, under a writer whose lease does not end
LAST = 2  # the last time of `prices` there


@cache
def _stored() -> tuple[dict[str, bytes], dict[str, dict[int, bytes]], dict[str, Any]]:
    blobs = {
        path.relative_to(OLD / "blob").as_posix(): path.read_bytes()
        for path in sorted((OLD / "blob").rglob("*"))
        if path.is_file()
    }
    database = sqlite3.connect(f"file:{OLD / 'state.db'}?immutable=1", uri=True)
    versions: dict[str, dict[int, bytes]] = {}
    for key, seqno, data in database.execute("SELECT key, seqno, data FROM versions ORDER BY key, seqno"):
        versions.setdefault(key, {})[seqno] = data
    database.close()
    return blobs, versions, json.loads((OLD / "contents.json").read_text(encoding="utf-8"))


def fill(world: World) -> None:
    """Put the location into the stores of the world, before anything is there."""
    blobs, versions, _ = _stored()
    world.blob._shared.blobs.update(blobs)
    for key, there in versions.items():
        assert list(there) == list(range(min(there), max(there) + 1))
        world.consensus._shared.logs[key] = _Log(min(there), list(there.values()))


async def heir(scene: Scene, name: str, client: ap.Client) -> None:
    """Appends to a shard of the last release, and reads what was there."""
    async with client.writer("prices", PRICES) as handle:
        while (number := scene.ledger.done[name]) < scene.writes:
            key = f"new {name}-{number}"
            try:
                await handle.write([(key, number)], once=key)
            except ap.LeaseExpired:
                return
            scene.ledger.write("prices", key, number)
            scene.ledger.done[name] += 1
            await check_prices(scene, client)
            await scene.pause()


async def check_prices(scene: Scene, client: ap.Client) -> None:
    """All that the last release wrote is there, with all that was acknowledged since."""
    contents = _stored()[2]
    written = dict(scene.ledger.written.get("prices", {}))
    async with client.reader("prices", PRICES) as reader, reader.snapshot() as snapshot:
        rows = await snapshot.rows()
    assert {diff for _, _, diff in rows} == {1}
    there = {(key, val) for key, val, _ in rows}
    assert len(there) == len(rows)
    old = {(key, val) for key, val in contents["prices"]["at"][f"{LAST}"]}
    assert old == {(key, val) for key, val in there if not key.startswith("new ")}
    missing = written.items() - {(key, val) for key, val in there}
    assert not missing, f"lost from a shard of the last release: {missing}"


async def check(scene: Scene, honest: ap.Client) -> None:
    """At the end."""
    await check_prices(scene, honest)
    contents = _stored()[2]
    async with honest.reader("people") as reader, reader.snapshot() as snapshot:
        names = [val["name"] for _, val, _ in await snapshot.rows()]
    assert names == contents["people"]["names"]
    async with honest.reader("readings") as reader, reader.snapshot() as snapshot:
        assert [list(row[:2]) for row in await snapshot.rows()] == contents["readings"]["rows"]
