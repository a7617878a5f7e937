"""Random actors on one shard, and their observations, compared with the list of all updates.

Every actor is a task in a process of its own, or in one that it shares: a process is a client, with
settings that are tiny more often than not. Writers append by every way there is, and may be cut off in the
middle of any call; readers take snapshots at any time, follow, go away and come back by cursor, some with
holds that must keep their promise; movers give up history; and the background of every client, forced
calls, and a compactor of the game's own compact and collect, since *any* legal compaction at any moment
must stay invisible. The stores refuse, lose answers, drop requests and land some of them late; their clock
jumps, so that leases run out; processes are killed, and others take over (`world.py`).

Nothing is checked on the way: what was seen is written down, and compared at the end, when the
outcome of every append is known, or which ones are possible (`verdict.py`). `play(seed)` is one game.

The actors share `game.py`; they are in `writers.py`, `readers.py`, `followers.py` and `maintainers.py`.
"""

import asyncio
import random
import uuid
from collections import Counter
from typing import Any

import aiopersist as ap
from aiopersist.testing.model import Model
from tests.simulation.followers import follower, sleeper
from tests.simulation.game import Act, Game
from tests.simulation.maintainers import clock_jumper, keeper, mover, owner
from tests.simulation.readers import reader
from tests.simulation.verdict import Told, lists
from tests.simulation.world import Complaints
from tests.simulation.writers import writer


async def play_to_the_end(game: Game) -> None:
    rng = game.rng
    async with game.client(rng) as shared:
        await (await shared.writer(game.name, game.schema)).aclose()
        shard_id = await shared.shard_id(game.name)

        async def actor(act: Act, *args: Any) -> None:
            mine = random.Random(rng.random())
            if mine.random() < 0.4:
                await act(game, mine, shared, *args)
            else:
                await game.process(mine, act, *args)

        told = [Told(rng.choice(faiths(game)), f"f{n}") for n in range(rng.choice([1, 2, 4]))]
        followers = [asyncio.create_task(actor(follower, one)) for one in told]
        landing = asyncio.create_task(land(game))
        try:
            async with asyncio.TaskGroup() as group:
                for act, moves in cast(game, rng):
                    group.create_task(actor(act, moves))
            await asyncio.sleep(0)
        except BaseException:
            for following in followers:
                following.cancel()
            await asyncio.wait(followers)
            raise
        finally:
            game.writing = False
            landing.cancel()
            game.faults.heal()
            await game.faults.land()
        await asyncio.gather(*followers)
    await game.faults.land()
    await verify(game, shard_id)


def faiths(game: Game) -> list[str]:
    return [""] if game.product else ["", "", "named", "critical"]


def cast(game: Game, rng: random.Random) -> list[tuple[Act, int]]:
    """Who plays, beside the followers, and for how many moves."""
    writers: list[tuple[Act, int]] = [(writer, rng.choice([5, 15])) for _ in range(rng.choice([1, 2, 3]))]
    readers = [(reader, rng.choice([3, 10])) for _ in range(2)]
    others = [
        (mover, 0.6),
        (owner, 0.4),
        (owner, 0.3),
        (keeper, 0.5),
        (keeper, 0.3),
        (clock_jumper, 0.4),
        (sleeper, 0.3),
    ]
    return writers + readers + [(act, rng.choice([5, 15])) for act, rate in others if rng.random() < rate]


async def land(game: Game) -> None:
    while True:
        await asyncio.sleep(0.005)
        await game.faults.land()


async def verify(game: Game, shard_id: str) -> None:
    """After a quiet moment: all observations are explained, the shard is sound, and once no registration
    is left no blob is without a name."""
    line, settings = game.world.line(), game.settings(random.Random(0))
    async with game.world.open(line, settings, maintenance=False) as client:
        upper = await look_at_the_end(game, client)
        game.seen.check(models(game, upper))
        game.world.clock.jump(10_000)
        await client.force_gc(game.name)
        report = await client.fsck(game.name)
        assert report.ok, report.problems
        await client.sweep_leaked_blobs(dry_run=False)
        there, named = await game.world.blobs(shard_id), await game.world.named(shard_id)
        assert there == named, f"leaked {there - named}, lost {named - there}"
        await client.force_compaction(game.name)
        await client.force_gc(game.name)
        assert await look_at_the_end(game, client) == upper
        game.seen.check(models(game, upper))


async def look_at_the_end(game: Game, client: ap.Client) -> ap.Antichain:
    """The upper; the contents at the ends of what can be read are written down."""
    async with client.reader(game.name, game.schema) as reader:
        upper, since = await reader.fetch_recent_upper(), reader.since
        readable = [t for t in game.within(game.least, upper) if since.less_equal(t)]
        for time in readable[:5] + readable[-5:]:
            async with reader.snapshot(time) as snapshot:
                game.seen.snapshots.append((time, await snapshot.rows()))
    return upper


def models(game: Game, upper: ap.Antichain) -> Any:
    """All that was committed, in order: every list that is possible."""
    if not game.definite:
        return lists(game.seen.pieces, game.least, upper)
    model = Model(game.least.elements)
    rows = [row for time in game.within(game.least, upper) for row in game.definite_rows(time)]
    model.append(rows, game.least.elements, upper.elements)
    return iter([model])


async def play(seed: int, blob: str = "", consensus: str = "") -> Counter[str]:
    """One game; what happened in it, by kind."""
    url = f"mem://{uuid.uuid4().hex}"
    game = Game(seed, blob or url, consensus or url)
    try:
        with Complaints() as complaints:
            async with asyncio.timeout(60):
                await play_to_the_end(game)
        assert not complaints.heard, complaints.heard
    except BaseException as error:
        error.add_note(f"seed {seed}")
        raise
    finally:
        await game.world.aclose()
    game.counts["snapshots"] += len(game.seen.snapshots)
    game.counts["followed"] += sum(len(told.seen) for told in game.seen.follows)
    return game.counts
