"""Programs on what lies beside shards and tables: an `Indexed`, a stash, a schema that changes."""

import aiopersist as ap
from aiopersist.indexed import Fenced, Indexed, Refused, Stopped, Stream
from aiopersist.stash import TableTransaction, TypedCollection, transact
from aiopersist.stash.errors import Fenced as StashFenced
from tests.support.schemas import V1, V2
from tests.worlds.scene import ACCOUNTS, EACH, Scene

STASHED: TypedCollection[str, int] = TypedCollection("accounts", str, int)
NOTES: TypedCollection[str, int] = TypedCollection("notes", str, int)
ONE, TWO = (ap.Schema(key=str, val=version) for version in (V1, V2))


async def streamer(scene: Scene, name: str, client: ap.Client) -> None:
    """Streams of an `Indexed` take updates at any time, and are sealed; its owners fence each other."""
    try:
        async with client.indexed("streams") as indexed:
            streams = [await indexed.register(one, str, int) for one in ("one", "two")]
            mine = set(scene.ledger.written.get("streams", {}))  # and what others write goes unnoticed
            while scene.ledger.done[name] < scene.writes:
                number = scene.ledger.done[name]
                scene.ledger.done[name] += 1
                sealed = scene.ledger.promised.get("sealed", 0)
                time = sealed + scene.dice.choice([0, 1, 1, 3])
                key = f"{name}-{number}"
                scene.ledger.write("streams sent", key, time)
                try:
                    await indexed.write([(stream, [(key, number, time, 1)]) for stream in streams])
                except Refused as error:
                    scene.counts["stream refused"] += 1
                    scene.promise(error.frontier is None or time < error.frontier.time, error)
                    continue
                scene.ledger.write("streams", key, time)
                mine.add(key)
                if scene.rolled(0.4):
                    await seal(scene, indexed, streams, sealed + 1)
                    await late(indexed, streams, scene.ledger.promised.get("sealed", 0))
                await scene.pause()
                await look(indexed, streams, mine)
    except (Fenced, Stopped):
        scene.counts["stream fenced"] += 1
        if scene.ledger.done[name] < scene.writes:
            raise ap.StorageUnavailable("again") from None


async def seal(scene: Scene, indexed: Indexed, streams: list[Stream[str, int]], time: int) -> None:
    try:
        await indexed.seal(streams, time)
    except Refused:
        return
    scene.ledger.promised["sealed"] = max(scene.ledger.promised.get("sealed", 0), time)
    if scene.rolled(0.3):
        await indexed.allow_compaction([(stream, time - 1) for stream in streams])


async def late(indexed: Indexed, streams: list[Stream[str, int]], sealed: int) -> None:
    """What is sealed takes no update."""
    if not sealed:
        return
    try:
        await indexed.write([(stream, [("late", 0, sealed - 1, 1)]) for stream in streams])
    except Refused:
        return
    raise AssertionError(f"a stream that is sealed until {sealed} took an update before")


async def look(indexed: Indexed, streams: list[Stream[str, int]], acknowledged: set[str]) -> None:
    """Both streams have all that was acknowledged to this owner, or before it, once."""
    for stream in streams:
        async with indexed.snapshot(stream) as snapshot:
            rows = [(key, diff) for key, _, _, diff in await snapshot.rows()]
        assert len(set(rows)) == len(rows) and {diff for _, diff in rows} <= {1}, f"twice: {rows}"
        there = {key for key, _ in rows}
        assert acknowledged <= there, f"lost from a stream: {acknowledged - there}"


async def stasher(scene: Scene, name: str, client: ap.Client) -> None:
    """Moves what is in accounts of a stash that several share, or own one after the other."""
    machine, owns = scene.world.machine(name), scene.dice.random() < 0.3

    def move(accounts: TableTransaction[str, int], notes: TableTransaction[str, int]) -> None:
        if notes.get(note) is not None:
            return
        for account in ACCOUNTS:
            if accounts.get(account) is None:
                accounts.set(account, EACH)
        accounts.set(one, (accounts.get(one) or 0) - 1)
        accounts.set(other, (accounts.get(other) or 0) + 1)
        notes.set(note, 1)

    try:
        async with machine.stash(exclusive=owns, settings=scene.settings) as stash:
            mine = stash._session.writing().fence.epoch
            scene.ledger.promised["epoch"] = max(scene.ledger.promised.get("epoch", 0), mine)
            while (number := scene.ledger.done[name]) < scene.writes:
                note, newest = f"{name}-{number}", scene.ledger.promised["epoch"]
                one, other = scene.dice.sample(ACCOUNTS, 2)
                await transact(stash, move, STASHED, NOTES)
                assert newest <= mine, "an opener wrote that had been taken over"
                scene.ledger.done[name] = number + 1
                scene.ledger.write("stash", note, 1)
                acknowledged = set(scene.ledger.written["stash"])
                found = await STASHED.peek_one(stash)
                assert sum(found.values()) == EACH * len(ACCOUNTS), found
                missing = acknowledged - (await NOTES.peek_one(stash)).keys()
                assert not missing, f"lost from a stash: {missing}"
                scene.counts["stashed"] += 1
                await scene.pause()
    except StashFenced:
        scene.counts["stash fenced"] += 1
        if scene.ledger.done[name] < scene.writes:
            raise ap.StorageUnavailable("again") from None


async def evolver(scene: Scene, name: str, client: ap.Client) -> None:
    """Writers of an old and a new schema go on together while one of them evolves it."""
    new = scene.rolled(0.5)
    if new:
        async with client.writer("persons", ONE):
            pass
        number, schema = await client.schema("persons")
        if schema.arrow_schema != TWO.arrow_schema:
            try:
                await client.compare_and_evolve_schema("persons", number, TWO)
            except ap.SchemaMismatch:
                scene.counts["evolved by another"] += 1
    async with client.writer("persons", TWO if new else ONE) as handle:
        while scene.ledger.done[name] < scene.writes:
            at = scene.ledger.done[name]
            val = V2(name=f"{at}", age=at) if new else V1(name=f"{at}")
            try:
                await handle.write([(f"{name}-{at}", val)], once=f"{name}-{at}")
            except ap.LeaseExpired:
                return
            scene.ledger.write("persons", f"{name}-{at}", at)
            scene.ledger.done[name] += 1
            scene.counts["evolved" if new else "not evolved"] += 1
            await scene.pause()
