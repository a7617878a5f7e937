"""Programs that make any calls on tables, at random; what they are told must be strictly serializable.

The calls, and the checker, are those of the random games of `tests/table`."""

import aiopersist as ap
from tests.table.moves import RATES, Player, drawn
from tests.table.verdict import verify
from tests.worlds.scene import Scene

MOVES = 2  # times what other programs write
CUTS = 2  # commit times at which all tables are read


async def player(scene: Scene, name: str, client: ap.Client) -> None:
    """Each life of it is a client of its own. A call that has an id is made until it is answered, if its
    machine lives."""
    scene.ledger.done[f"life of {name}"] += 1
    life = f"{name}.{scene.ledger.done[f'life of {name}']}"
    making = Player(life, client, scene.ledger.events.append, lambda: scene.world.now_s)
    try:
        await making.open()
        while (number := scene.ledger.done[name]) < MOVES * scene.writes:
            scene.ledger.done[name] += 1
            move = drawn(scene.dice, f"{name}-{number}", RATES)
            while not await making.do(move) and move.once is not None:
                scene.counts["made again"] += 1
                await scene.pause()
            scene.counts[f"move {move.kind}"] += 1
            await scene.pause()
    except ap.LeaseExpired:
        return


async def begin(scene: Scene, honest: ap.Client) -> None:
    await Player("setup", honest, scene.ledger.events.append, lambda: scene.world.now_s).prepare()


async def check(scene: Scene, honest: ap.Client) -> None:
    ops = await verify(honest, scene.ledger.events, f"world {scene.world.seed}", cuts=CUTS)
    scene.counts["checked calls"] += len(ops)
