"""What must be true at the end of a world: what the programs were told, against what is there."""

from collections import Counter
from typing import Any

import aiopersist as ap
from tests.support.schemas import SCHEMA
from tests.worlds import old
from tests.worlds.programs import mortals, publications, races, tags
from tests.worlds.programs.beside import NOTES, STASHED
from tests.worlds.scene import ACCOUNTS, EACH, Scene

BATCHES_MAX = 3  # of a shard that was compacted
VERSIONS_MAX = 30  # of a shard that was collected
AFTER_LEASES_S = 400.0
FOREVER_S = 1e9
AHEAD_S = 60.0


async def check(scene: Scene, honest: ap.Client, roles: set[str]) -> None:
    """All that can be known without any program of the world."""
    shards = {one.name for one in await honest.overview() if one.seqno is not None}
    if "events" in shards:
        await check_events(scene, honest)
    if "counter" in roles:
        counts = await honest.table("counts", str, int).get("all")
        assert counts == told(scene, "counter"), f"{counts} were counted, told {told(scene, 'counter')}"
    if "mover" in roles:
        found = await honest.table("money", str, int).get_many(ACCOUNTS)
        assert sum(found.values()) == EACH * len(ACCOUNTS), found
        moves = await honest.table("moves", str, int).count()
        assert moves == told(scene, "mover"), f"{moves} moves, told {told(scene, 'mover')}"
    if "putter" in roles:
        rows = {key: val async for key, val in honest.table("rows", str, int).items()}
        assert rows == scene.ledger.written.get("rows", {}), rows
    for role, table, name in (("biller", "bills", "billing"), ("sharer", "shares", "shared")):
        if role in roles:
            await check_bills(scene, honest, table, name)
    if "relay" in roles and "copies" in shards:
        await check_copies(scene, honest)
    if "joint" in roles and "twin" in shards:
        await check_twin(scene, honest)
    if "replica" in roles and "ticks" in shards:
        await check_ticks(scene, honest)
    if "racer" in roles and "race" in shards:
        await races.check(scene, honest)
    if "mortal" in roles:
        await mortals.check(scene, honest)
    if "evolver" in roles and "persons" in shards:
        await check_people(scene, honest)
    if "streamer" in roles:
        await check_streams(scene, honest)
    if "stasher" in roles:
        await check_stash(scene)
    if "heir" in roles:
        await old.check(scene, honest)
    if "tagger" in roles:
        await tags.check(scene, honest)
    if "publisher" in roles:
        publications.check(scene)


async def check_times(scene: Scene, honest: ap.Client) -> None:
    """No table was moved into the future, or beyond."""
    latest = 1_000_000 * (scene.world.runtime.wall() + AHEAD_S)
    there = {one.name for one in await honest.overview() if one.seqno is not None}
    for name in there & {"counts", "money", "moves", "rows", "duty"}:
        upper = await honest.upper(name)
        assert upper.time < latest, f"{name} is at {upper}, now is {latest}"  # type: ignore[operator]


def told(scene: Scene, role: str) -> int:
    return sum(n for name, n in scene.ledger.done.items() if name.rstrip("0123456789") == role)


async def rows_of(honest: ap.Client, shard: str, as_of: int | None = None) -> list[Any]:
    if not (await honest.upper(shard)).time:
        return []
    async with honest.reader(shard, SCHEMA) as reader, reader.snapshot(as_of) as snapshot:
        return await snapshot.rows()


async def check_events(scene: Scene, honest: ap.Client) -> None:
    ledger, upper = scene.ledger, (await honest.upper("events")).time
    assert isinstance(upper, int)
    there = {val: time for _, val, time, _ in ledger.log}
    assert len(ledger.log) == len(there), "an update is there twice"
    assert {diff for _, _, _, diff in ledger.log} <= {1} and there.keys() <= ledger.sent
    wrong = {n: (time, there.get(n)) for n, time in ledger.told.items() if there.get(n) != time}
    assert not wrong, f"told, and there: {wrong}"
    assert not ledger.refused & there.keys(), f"refused, and there: {ledger.refused & there.keys()}"
    for where in (name for name in ledger.written if name.startswith(("repeater", "handed over"))):
        lost = ledger.written[where].keys() - there.keys()
        assert not lost, f"acknowledged to {where}, and lost: {lost}"
    for as_of, rows in ledger.snapshots:
        assert rows == ledger.contents(as_of + 1), f"contents at {as_of}"
    assert await rows_of(honest, "events") == ledger.contents(upper)
    for name, heard in ledger.heard.items():
        check_heard(scene, name, heard)
    if "owned" in ledger.promised:
        kept = (await honest.inspect("events")).critical["owned"].since.time
        assert isinstance(kept, int) and kept >= ledger.promised["owned"]
        if kept < upper:
            assert await rows_of(honest, "events", kept) == ledger.contents(kept + 1)


def check_heard(scene: Scene, name: str, heard: list[Any]) -> None:
    """Each update once: the first ones as contents, with one time."""
    until = scene.ledger.promised.get(name, 0)
    rows = sorted((key, val, diff) for key, val, _, diff in heard)
    assert rows == scene.ledger.contents(until), f"{name} was told other updates until {until}"


async def check_bills(scene: Scene, honest: ap.Client, table: str, name: str) -> None:
    """Each event that the subscription has passed is billed once, and no other."""
    bills = {key: val async for key, val in honest.table(table, str, int).items() if key != "all"}
    assert set(bills.values()) <= {1}, f"billed twice: {bills}"
    views = await honest.subscriptions("events")
    mine = {at: view for at, view in views.items() if at.partition("[")[0] == name}
    sent = {f"{number}" for number in scene.ledger.sent}
    assert bills.keys() <= sent
    if len(mine) != (2 if table == "shares" else 1) or any(view.contents for view in mine.values()):
        return
    least = min(view.position.time for view in mine.values())
    passed = {str(val) for _, val, time, _ in scene.ledger.log if time < least}  # type: ignore[operator]
    assert passed <= bills.keys(), f"passed, and not billed: {passed - bills.keys()}"
    if table == "bills":
        assert passed == bills.keys(), f"billed, and not passed: {bills.keys() - passed}"


async def check_copies(scene: Scene, honest: ap.Client) -> None:
    rows = await rows_of(honest, "copies")
    assert all(diff == 1 for _, _, diff in rows), f"copied twice: {rows}"
    view = (await honest.subscriptions("events")).get("relay")
    assert view is not None
    if not view.contents:
        passed = scene.ledger.contents(view.position.time)  # type: ignore[arg-type]
        assert rows == passed, f"copied {rows}, passed {passed}"


async def check_twin(scene: Scene, honest: ap.Client) -> None:
    """The same numbers are in both shards, and those that were acknowledged are."""
    numbers = Counter(val for _, val, _ in await rows_of(honest, "twin"))
    sent = scene.ledger.written.get("twin sent", {}).keys()
    both = {val for _, val, _, _ in scene.ledger.log} & sent
    assert numbers == Counter(both), f"in one of two shards: {numbers.keys() ^ both}"
    assert scene.ledger.written.get("twin", {}).keys() <= both


async def check_ticks(scene: Scene, honest: ap.Client) -> None:
    upper = (await honest.upper("ticks")).time
    assert isinstance(upper, int) and upper >= max(scene.ledger.written.get("ticks", {0: 0}))
    assert await rows_of(honest, "ticks") == [("tick", time, 1) for time in range(upper)]


async def check_people(scene: Scene, honest: ap.Client) -> None:
    if not (await honest.upper("persons")).time:
        assert not scene.ledger.written.get("persons")
        return
    async with honest.reader("persons") as reader, reader.snapshot() as snapshot:
        rows = await snapshot.rows()
    assert all(diff == 1 for _, _, diff in rows) and len({key for key, _, _ in rows}) == len(rows), rows
    there = {key: val.get("age") for key, val, _ in rows}
    for key, age in scene.ledger.written.get("persons", {}).items():
        assert key in there and (there[key] in (age, None)), (key, age, there.get(key))


async def check_streams(scene: Scene, honest: ap.Client) -> None:
    """Both streams have the same: what was acknowledged, once, and nothing that was not sent."""
    sent, acknowledged = (scene.ledger.written.get(name, {}) for name in ("streams sent", "streams"))
    async with honest.indexed("streams", readonly=True) as indexed:
        for name in ("one", "two"):
            stream = await indexed.load(name, str, int)
            if stream is None:
                assert not acknowledged
                continue
            async with indexed.snapshot(stream) as snapshot:
                rows = await snapshot.rows()
                assert snapshot.seal.time >= scene.ledger.promised.get("sealed", 0)  # type: ignore[operator]
                since = snapshot.since.time
            keys = Counter({key: diff for key, _, _, diff in rows})
            assert len(rows) == len(keys) and set(keys.values()) <= {1}, f"twice in a stream: {rows}"
            assert acknowledged.keys() <= keys.keys() <= sent.keys()
            wrong = [row for row in rows if row[2] != max(sent[row[0]], since)]
            assert not wrong, f"at other times in a stream: {wrong}"


async def check_stash(scene: Scene) -> None:
    machine = scene.world.machine("stasher at the end")
    async with machine.stash(settings=scene.settings) as stash:
        found = await STASHED.peek_one(stash)
        assert sum(found.values()) == EACH * len(ACCOUNTS), found
        assert (await NOTES.peek_one(stash)).keys() == scene.ledger.written["stash"].keys()


# --- what is left -------------------------------------------------------------------------------------


async def check_upkeep(scene: Scene, honest: ap.Client, forever: int) -> None:
    """After all leases: each shard is sound and small, and nothing lies there that nobody needs, but
    `forever` bytes of a writer whose lease does not end."""
    await scene.world.sleep(AFTER_LEASES_S)
    found = [one for one in await honest.overview() if one.seqno is not None]
    shards = [one.name for one in found if one.kind != "indexed"]
    for shard in shards:
        await honest.force_compaction(shard)
        await honest.force_gc(shard)
    await honest.sweep_leaked_blobs(dry_run=False)
    for shard in shards:
        await honest.force_gc(shard)
        report = await honest.fsck(shard)
        assert report.ok, (shard, report.problems)
        view = await honest.inspect(shard)
        assert len(view.batches) <= BATCHES_MAX, f"{shard} has {len(view.batches)} batches"
        assert view.live_diffs <= VERSIONS_MAX, f"{shard} has {view.live_diffs} versions"
    for indexed in found:
        if indexed.kind == "indexed":
            report = await honest.fsck(indexed.shard_id)
            assert report.ok, (indexed.name, report.problems)
    await check_nothing_is_left(honest, forever)


async def check_nothing_is_left(honest: ap.Client, forever: int) -> None:
    """But what somebody needs, and those bytes."""
    usage = await honest.usage()
    assert usage.total == usage.referenced + forever, f"bytes that nobody needs: {usage}"


async def check_no_lease_is_left(honest: ap.Client) -> None:
    """All clients are closed, or crashed so long ago that their leases have ended; those of the last release
    (`old.py`) never do."""
    for name in await honest.list_shards():
        view = await honest.inspect(name)
        leases = {**view.readers, **view.writers}
        left = {who: lease for who, lease in leases.items() if lease.lease_s < FOREVER_S}
        assert not left, f"leases on {name}: {left}"


def check_nothing_runs(scene: Scene) -> None:
    """Whoever has ended has left no task."""
    left = [task for machine in scene.world.machines.values() for task in machine._life.tasks]
    assert not left, f"still running: {left}"
