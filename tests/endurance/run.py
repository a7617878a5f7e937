"""The long run: four processes on Postgres and S3, for as long as one likes, under all faults at once.

python -m tests.endurance.run --minutes 60 --seed 1

It prints its figures at the end, as JSON, and fails if anything was lost, doubled or stayed unknown.
"""

import argparse
import asyncio
import json
import logging
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import aiopersist as ap
from aiopersist.testing.proxy import TcpProxy
from tests.endurance.faults import Faults
from tests.endurance.notes import ONCE, Note, notes_of
from tests.endurance.servers import Place
from tests.endurance.verdict import judged, judged_directory, told_by
from tests.endurance.worker import ACCOUNTS, BALANCE, LOG, Orders

ROOT = Path(__file__).parents[2]
PLACES = "abcd"
END_S = 300.0
POLL_S = 0.05
DISK_BYTES = 1 << 33  # of each store: an hour leaves some GiB of versions and garbage


class Run:
    """See the header."""

    def __init__(self, folder: Path, seconds: float, seed: int, *, pause_s: float, scale: float) -> None:
        self.folder = folder
        self.seconds = seconds
        self.seed = seed
        self.pause_s = pause_s
        self.scale = scale
        self.dice = random.Random(seed)
        self.place = Place(folder, DISK_BYTES)
        self.proxies: dict[str, TcpProxy] = {}
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.notes: list[Path] = []
        self.kills: Counter[str] = Counter()
        self.stop = folder / "stop"
        self.ending = asyncio.Event()

    async def play(self) -> dict[str, Any]:
        """The figures."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self.place.close)
            await self.place.start()
            for name, server in self.place.servers.items():
                self.proxies[name] = await stack.enter_async_context(TcpProxy("127.0.0.1", server.port))
            blob, consensus = self.place.direct
            async with ap.open(blob=blob, consensus=consensus, maintenance=False) as client:
                accounts = client.table("accounts", str, int)
                await accounts.put_many({f"a{number}": BALANCE for number in range(ACCOUNTS)})
                await (await client.writer("log", LOG)).aclose()
                await (await client.subscription("log", name="counting")).aclose()
            return await self._play(blob, consensus)

    async def _play(self, blob: str, consensus: str) -> dict[str, Any]:
        faults = Faults(self.place, self.proxies, self._living, random.Random(self.seed + 1), self.scale)
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            lives = [group.create_task(self._live(place)) for place in PLACES]
            making = group.create_task(faults.play())
            await asyncio.wait([making, *lives], timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED)
            self.stop.touch()
            self.ending.set()
            making.cancel()
            with suppress(asyncio.CancelledError):
                await making
            await faults.heal()
        lasted_s = time.monotonic() - began
        notes = [note for path in self.notes for note in notes_of(path)]
        async with ap.open(blob=blob, consensus=consensus, maintenance=False) as client:
            await _caught_up(client)
            verdict = await judged(client, notes, told_by(notes, faults.windows))
        async with ap.open(self.folder / "local", maintenance=False) as client:
            await judged_directory(client, notes, verdict)
        stores = {name: (proxy.accepted, proxy.refused, proxy.cuts) for name, proxy in self.proxies.items()}
        return {
            "seed": self.seed,
            "seconds": round(lasted_s, 1),
            "all_operations": sum(verdict.operations.values()),
            "faults": dict(sorted((faults.counts + self.kills).items())),
            "connections (made, refused, cut)": stores,
            "processes": len(self.notes),
            **vars(verdict),
            "good": verdict.is_good,
        }

    def _living(self) -> list[int]:
        return [process.pid for process in self.processes.values() if process.returncode is None]

    async def _live(self, place: str) -> None:
        """One process after the other; each but the last is killed at some moment."""
        again: tuple[tuple[str, str], ...] = ()
        number = 0
        while True:
            orders = self._orders(place, f"{place}{number}", again)
            killed = await self._run(orders)
            again = tuple(_untold(list(notes_of(Path(orders.notes))), again))
            if not killed and self.ending.is_set():
                break
            number += 1
        assert not again, f"it ended, and was not told of {again}"

    def _orders(self, place: str, name: str, again: tuple[tuple[str, str], ...]) -> Orders:
        blob, consensus = self.place.urls({name: proxy.port for name, proxy in self.proxies.items()})
        path = self.folder / f"{name}.notes"
        path.touch()
        self.notes.append(path)
        return Orders(
            name,
            place,
            blob,
            consensus,
            str(path),
            str(self.stop),
            str(self.folder / "local"),
            self.seed,
            self.pause_s,
            self.dice.choice([None, 5.0]),
            place == PLACES[0],
            again,
        )

    async def _run(self, orders: Orders) -> bool:
        """One process; whether it was killed."""
        file = self.folder / f"{orders.name}.orders"
        file.write_text(json.dumps(asdict(orders)))
        with (self.folder / f"{orders.name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tests.endurance.worker", str(file), cwd=ROOT, stdout=log, stderr=log
            )
        self.processes[orders.place] = process
        ended, ending = asyncio.ensure_future(process.wait()), asyncio.ensure_future(self.ending.wait())
        if self.dice.random() < 0.9:  # the others may be killed while they open
            while not (Path(orders.notes).stat().st_size or ended.done() or ending.done()):
                await asyncio.sleep(POLL_S)
        life_s = self.dice.uniform(1.0, 60.0) * self.scale
        await asyncio.wait([ended, ending], timeout=life_s, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        killed = not ended.done() and not self.ending.is_set()
        if killed:
            process.kill()
        elif not ended.done():
            os.kill(process.pid, signal.SIGCONT)
        async with asyncio.timeout(END_S):
            code = await ended
        if killed:
            self.kills["kill a process"] += 1
        elif code:
            raise AssertionError(f"process {orders.name}: {(self.folder / f'{orders.name}.log').read_text()}")
        return killed


def _untold(notes: list[Note], again: tuple[tuple[str, str], ...]) -> Iterator[tuple[str, str]]:
    """The calls with an id of which a process was not told, and those that it was to make again."""
    told = {(note.kind, note.op) for note in notes if note.what == "told"}
    began = [(note.kind, note.op) for note in notes if note.what == "began" and note.kind in ONCE]
    return (call for call in dict.fromkeys([*again, *began]) if call not in told)


async def _caught_up(client: ap.Client) -> None:
    """Take what the subscription has not delivered yet, as the processes do."""
    delivered = client.table("delivered", str, int)
    async with client.reader("log", LOG) as reader:
        upper: Any = (await reader.fetch_recent_upper()).time
    async with client.subscription("log", name="counting") as subscription:
        while True:
            try:
                step = await asyncio.wait_for(anext(subscription), 10)
            except TimeoutError:
                return
            count = sum(update.diff for update in step.updates)

            async def body(tx: ap.Transaction, count: int = count) -> None:
                tx.put(delivered, "all", (await tx.get(delivered, "all") or 0) + count)

            await client.transact(body, acks=[(subscription, step)])
            if step.upper.time >= upper and not step.contents:
                return


async def play(seconds: float, seed: int, *, pause_s: float = 0.15, scale: float = 1.0) -> dict[str, Any]:
    """One run; its figures. Its folder stays if it fails."""
    folder = Path(mkdtemp(prefix="aiopersist-endurance-"))
    print(f"in {folder}", file=sys.stderr)
    figures = await Run(folder, seconds, seed, pause_s=pause_s, scale=scale).play()
    if figures["good"]:
        shutil.rmtree(folder)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.endurance.run", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="of how long faults and processes last")
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    figures = asyncio.run(play(chosen.minutes * 60, chosen.seed, scale=chosen.scale))
    print(json.dumps(figures, indent=1))
    raise SystemExit(not figures["good"])


if __name__ == "__main__":
    main()
