"""The processes of the game of `processes.py`: tasks that make random calls by one client, each with an end.

`python -m tests.table.worker` imports everything once, and forks for each line, which names a file of orders,
before any loop or thread is there. It answers by the id of the process."""

import asyncio
import os
import pickle
import random
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import aiobotocore.session  # noqa: F401  # a fork must not have to import it, nor the others
import asyncpg  # noqa: F401
import pyarrow.compute
import pyarrow.parquet  # noqa: F401

import aiopersist as ap
from aiopersist.testing.faults import Faults, FaultyBlob, FaultyConsensus, Outcome
from tests.table.history import writes_to
from tests.table.moves import RATES, Move, Player, drawn

FAULTS = {Outcome.REFUSED: 0.01, Outcome.LOST: 0.02, Outcome.DROPPED: 0.01}
CALL_S = 150.0  # a call that has no answer by then waits without end


@dataclass(frozen=True)
class Orders:
    """What a process is to do. Its random calls follow from `seed` and `name`."""

    name: str
    blob: str
    consensus: str
    log: Path
    seed: int
    tasks: int
    moves: int
    """Of each task."""
    again: tuple[Move, ...] = ()
    """Calls with an id that a process before it was not told of."""
    faults: bool = False
    """Whether requests fail and answers are lost, beside what is on the way to the stores."""


async def work(orders: Orders) -> None:
    """Carry them out."""
    dice = random.Random(f"{orders.seed} {orders.name}")
    faults = Faults(dice.randrange(2**32), FAULTS if orders.faults else {}, latency_s=(0.0, 0.001))
    blob, consensus = ap.open_blob(orders.blob), ap.open_consensus(orders.consensus)
    settings = ap.Settings(
        inline_writes_single_max_bytes=dice.choice([0, 16384]),
        watch_timeout_s=0.5,
        open_timeout_s=CALL_S,
        blob_target_size=2000,
        table_resident_bytes=dice.choice([0, 900, 2**26]),
    )
    note = writes_to(os.open(orders.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    opening = ap.open(
        blob=FaultyBlob(blob, faults), consensus=FaultyConsensus(consensus, faults), settings=settings
    )
    async with opening as client:
        player = await Player(orders.name, client, note).open()
        await asyncio.gather(
            *(_told(player, move) for move in orders.again),
            *(_play(player, task, orders.moves, dice.random()) for task in range(orders.tasks)),
        )
    await blob.aclose()
    await consensus.aclose()


async def _play(player: Player, task: int, moves: int, seed: float) -> None:
    dice = random.Random(seed)
    for number in range(moves):
        move = drawn(dice, f"{player.name}{task}-{number}", RATES)
        await _told(player, move)
        if move.once and dice.random() < 0.2:
            await _told(player, move)


async def _told(player: Player, move: Move) -> None:
    """Make it, again and again if it has an id."""
    try:
        async with asyncio.timeout(CALL_S):
            while not await player.do(move) and move.once:
                await asyncio.sleep(0.001)
    except TimeoutError as error:
        raise AssertionError(f"it waits without end: {move}") from error


def _forked(orders: Orders) -> None:
    """Says by a file how it ended."""
    try:
        asyncio.run(work(orders))
        orders.log.with_suffix(".done").touch()
    except BaseException:
        orders.log.with_suffix(".failed").write_text(traceback.format_exc())
    finally:
        os._exit(0)


def serve() -> None:
    """See the header."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _forked(pickle.loads(Path(line.strip()).read_bytes()))
        print(child, flush=True)


if __name__ == "__main__":
    serve()
