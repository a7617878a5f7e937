"""Random commands to an `Indexed`, compared with a plain list of updates: `play(seed)` is one game.

An owner writes, seals and lets go of history, one command at a time and several at once; readers look on;
steps and compactions are done by hand, at odd moments and wrongly; owners are killed, stopped, cut off in
their calls and taken over from; another client collects and sweeps. Stores fail. What was read is compared
at once with every state that is possible by what callers were told: there is more than one where an answer
was lost, until something that is read decides.

No time passes and no thread runs: clock, ids, delays and the order of tasks come from the seed, so a game is
repeated exactly. A failure names its seed and what was done last.
"""

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import aiopersist as ap
from aiopersist.indexed import Fenced, Records, Refused, Sealed, Stopped, Stream, UnknownStream
from aiopersist.shard.log import list_shards, load
from aiopersist.state.names import live_parts
from aiopersist.storage.memory import MemoryBlob, MemoryConsensus
from aiopersist.testing.faults import Faults, Outcome
from tests.indexed.naive import (
    ANSWERS,
    Allow,
    Destroy,
    Kept,
    Look,
    Model,
    Register,
    Row,
    Seal,
    Told,
    World,
    Write,
    summed,
)
from tests.indexed.seeded_loop import Dice, Wire, no_threads, spin
from tests.simulation import world
from tests.support.shards import RATES

NAME = "game"
TRANSIENT = (ap.StorageUnavailable, ap.Indeterminate)
SPINS = 300  # turns of the loop in which whatever is due has happened

TYPES: list[tuple[Any, Any]] = [(str, int), (int, str), (str, str)]
SCHEMAS = [ap.Schema(key, val) for key, val in TYPES]
VALUES: dict[Any, list[Any]] = {str: ["", "a", "b", "é" * 20], int: [0, 1, -1, 2**40]}


def kind_of(name: str) -> int:
    return int(name[1:]) % len(TYPES)


def stream(name: str) -> Stream[Any, Any]:
    return Stream(name, SCHEMAS[kind_of(name)])


@dataclass(eq=False)
class Player:
    """An instance in a process of its own, and what it has open."""

    line: Wire
    client: Any
    ix: Any
    background: bool = False
    fenced: bool = False
    snapshots: list[tuple[Any, str, Any]] = field(default_factory=list)
    listeners: list["Listening"] = field(default_factory=list)
    flights: dict[str, Any] = field(default_factory=dict)
    """Requests in flight, by stream."""
    unexpected: int = 0
    compacted: int = 0


@dataclass(eq=False)
class Listening:
    """A listener, and how far it was told."""

    name: str
    events: Any
    start: int
    seal: int
    taken: int = 0
    owners: bool = True
    over: bool = False


class Game:
    """See the header."""

    def __init__(self, seed: int, *, faulty: bool) -> None:
        self.seed = seed
        self.faulty = faulty
        self.rng = random.Random(f"{seed} {faulty}")
        self.lag = random.Random(f"lag {seed}")
        self.dice = Dice(seed)
        self.faults = Faults(seed, {})
        self.blob, self.consensus = MemoryBlob(), MemoryConsensus(runtime=self.dice)
        self.settings = self.chosen_settings()
        self.worlds = [World(Model())]
        self.known: dict[int, dict[Any, Model]] = {}
        """Every state that was possible at some time, by its seqno."""
        self.segment = 0
        self.shared: set[str] = set()
        """Streams whose last batch may be of several commands: where it ends is not known."""
        self.owner: Player | None = None
        self.ghost: Player | None = None
        self.reader: Player | None = None
        self.shaky = False
        self.exact = True
        self.rude = faulty
        """Something was cut off, or made in vain: blobs may be left to the sweep."""
        self.responses: list[tuple[str, Any]] = []
        self.story: list[str] = []
        self.counts: Counter[str] = Counter()
        self.fresh = 0

    def chosen_settings(self) -> ap.Settings:
        pick = self.rng.choice
        return ap.Settings(
            rollup_every=pick([4, 6, 8, 20]),
            watch_timeout_s=0.02,
            blob_target_size=pick([40, 150, 150, 2**20]),
            row_group_bytes=pick([40, 80, 2**20]),
            inline_writes_single_max_bytes=pick([0, 0, 60, 300]),
            indexed_inline_total_max_bytes=pick([100, 500, 2**20]),
            blob_cache_bytes=0,
            retry_timeout_s=pick([0.0, 0.0, 0.05, None]),
            listen_queue_max=pick([1, 2, 3, 100]),
            compaction_memory_bytes=pick([1, 400, 2**20]),
            indexed_step_s=0.002,
            fetch_max_outstanding_parts=pick([1, 3]),
        )

    @property
    def model(self) -> Model:
        return self.worlds[0].model

    @property
    def decided(self) -> bool:
        return len(self.worlds) == 1 and not self.worlds[0].late

    def note(self, text: str) -> None:
        self.story.append(text)
        self.counts[re.split(r"\W", text)[0]] += 1

    # --- players -------------------------------------------------------------------------------------

    async def open(self, *, readonly: bool = False, background: bool = False) -> Player:
        """An instance that is there in the end, however often it takes."""
        while True:
            line, client = Wire(self.faults, self.lag), None
            try:
                client = await self.opened_client(line)
                ix = await client.indexed(NAME, readonly=readonly, background=background)
                return Player(line, client, ix, background)
            except TRANSIENT:
                assert self.faulty
                if client is not None:
                    await client.aclose()

    async def opened_client(self, line: Wire) -> Any:
        stores = {
            "blob": world.LineBlob(self.blob, line),
            "consensus": world.LineConsensus(self.consensus, line),
        }
        return await ap.open(**stores, settings=self.settings, maintenance=False, runtime=self.dice)

    async def open_owner(self) -> None:
        self.owner = await self.open(background=self.rng.random() < 0.2)
        self.decide(expand=True)
        self.note(f"open {'with background' if self.owner.background else ''}")

    async def close(self, player: Player) -> None:
        """Stop it, twice; every call is `Stopped` then."""
        await player.ix.stop()
        await player.ix.stop()
        assert await self.outcome(player, Register("s0")) == ("Stopped",)
        await player.client.aclose()

    async def kill(self, player: Player) -> None:
        async def nothing() -> None:
            return None

        await world.kill(player.line, player.client, asyncio.create_task(nothing()))
        await self.faults.land()

    # --- what is possible ----------------------------------------------------------------------------

    def decide(self, *, expand: bool = False) -> None:
        """Nothing becomes durable any more but by what is called from now on."""
        found = [each for w in self.worlds for each in (w.expanded() if expand else [w])]
        self.keep([World(w.model) for w in found], "nothing is possible")

    def keep(self, worlds: list[World], complaint: str) -> None:
        """These are possible now."""
        assert worlds, complaint
        unique = {(w.model.key(), w.late): World(w.model, w.late) for w in worlds}
        self.worlds = [*unique.values()]
        self.counts["worlds"] += len(self.worlds) - 1
        for w in worlds:
            for model in (*w.past, w.model):
                self.known.setdefault(model.seqno, {})[model.key()] = model

    def make_alike(self) -> None:
        """Nothing that can be read tells apart what is possible."""
        names = {name for w in self.worlds for name in w.model.streams}
        assert not any(w.late for w in self.worlds)
        shown = [(w.model.seqno, [w.model.look(name) for name in sorted(names)]) for w in self.worlds]
        assert all(one == shown[0] for one in shown), shown
        self.exact = len(self.worlds) == 1
        self.worlds = self.worlds[:1]

    def judge(self, commands: list[Any], results: list[Any]) -> None:
        """Which worlds are possible after these calls, made in this order, had these results."""
        start = self.worlds
        found = []
        if len(commands) > 1 or results[:1] not in ([], [("seqno", self.model.seqno + 1)]):
            self.shared |= {name for c in commands if isinstance(c, Write) for name, _ in c.entries}
        for begin in (each for w in start for each in w.expanded()):
            worlds = [World(begin.model, begin.late, (begin.model,))]
            for command, result in zip(commands, results, strict=True):
                worlds = [n for w in worlds for n in w.after(command, result, self.segment)]
            found += worlds
        predicted = self.model.copy()
        told = [(c, r, predicted.run(c, 0)) for c, r in zip(commands, results) if not isinstance(c, Look)]
        self.keep(found, f"these results are not possible (command, result, expected): {told}")

    def check_looks(self, commands: list[Any], results: list[Any]) -> None:
        for at, (command, result) in enumerate(zip(commands, results)):
            if not isinstance(command, Look) or result[0] in (
                "failed",
                "gone",
                "cancelled",
                "Stopped",
                "Fenced",
            ):
                continue
            assert self.was_possible(command.name, result), (at, command, result)
            before = sum(r[0] in ("seqno", "Refused") for r in results[:at])
            least = min(w.model.seqno for w in self.worlds) - sum(
                isinstance(c, Write | Seal | Allow) for c in commands[at:]
            )
            assert result[0] == "UnknownStream" or result[0] >= least or not self.decided, (result, before)

    def was_possible(self, name: str, seen: Any) -> bool:
        """Whether some state showed that."""
        if seen[0] == "UnknownStream":
            return any(name not in m.streams for many in self.known.values() for m in many.values())
        return any(model.look(name) == seen for model in self.known.get(seen[0], {}).values())

    def saw(self, name: str, seen: Any) -> None:
        """A look by an instance that sees all durable data."""
        if seen[0] == "failed":
            return
        worlds = [each for w in self.worlds for each in w.expanded()]
        kept = [w for w in worlds if w.model.look(name) == seen]
        self.keep(kept, f"stream {name} is {seen}, expected {[w.model.look(name) for w in worlds]}")

    # --- calls ---------------------------------------------------------------------------------------

    async def outcome(self, player: Player, command: Any) -> Any:
        """What the caller is told."""
        try:
            return await self.called(player.ix, command)
        except Refused as e:
            return ("Refused", e.seqno, e.stream, e.time, None if e.frontier is None else e.frontier.time)
        except UnknownStream:
            return ("UnknownStream",)
        except ap.CodecMismatch:
            return ("CodecMismatch",)
        except Fenced:
            player.fenced = True
            return ("Fenced",)
        except Stopped:
            return ("Stopped",)
        except ap.StorageUnavailable:
            assert self.faulty
            return ("failed",)
        except ap.Indeterminate as error:
            assert self.faulty
            return ("failed",) if isinstance(command, Look) else ("unknown", error)

    async def called(self, ix: Any, command: Any) -> Any:
        match command:
            case Write(entries, slowly):
                given = [(stream(name), slow(rows) if slowly else list(rows)) for name, rows in entries]
                return ("seqno", await ix.write(given))
            case Seal(names, time):
                return ("seqno", await ix.seal([stream(name) for name in names], time))
            case Allow(sinces):
                return ("seqno", await ix.allow_compaction([(stream(name), s) for name, s in sinces]))
            case Register(name, right):
                key, val = TYPES[(kind_of(name) + (not right)) % len(TYPES)]
                made = await ix.register(name, key, val)
                assert made.name == name
                return ("done",)
            case Destroy(name):
                return ("done", await ix.destroy(name))
            case Look(name):
                async with await ix.snapshot(stream(name)) as snapshot:
                    return await self.read(snapshot)
        raise AssertionError(command)

    async def read(self, snapshot: Any) -> Any:
        """What it shows, by one of the ways."""
        way = self.rng.randrange(3)
        if way == 0:
            rows = await snapshot.rows()
        elif way == 1:
            parts = snapshot.split(self.rng.choice([1, 2, 3, 9]))
            rows = [row for many in await asyncio.gather(*map(drained, parts)) for row in many]
        else:
            rows = [row async for items in aiter_of(snapshot.split(2)) async for row in items]
        since = snapshot.since.time
        assert all(time >= since for _, _, time, _ in rows), (since, rows)
        return snapshot.seqno, since, snapshot.seal.time, summed(map(tuple, rows))

    # --- random commands -----------------------------------------------------------------------------

    def name(self) -> str:
        there = [*self.model.streams]
        if there and self.rng.random() < 0.95:
            return self.rng.choice(there)
        return self.rng.choice([*sorted(self.model.destroyed), "s98", f"s{self.fresh}"])

    def command(self) -> Any:
        pick = self.rng.random()
        if not self.model.streams or pick < 0.05:
            self.fresh += self.rng.random() < 0.5 and self.fresh < 9
            name = f"s{self.rng.randrange(self.fresh + 1)}"
            there = all(name in w.model.streams for w in self.worlds)
            return Register(name, not there or self.rng.random() < 0.7)
        if pick < 0.065:
            return Destroy(self.name())
        if pick < 0.5:
            entries = [(name, self.rows(name)) for name in self.names([1, 1, 2, 3])]
            return Write(tuple(entries), self.rng.random() < 0.1)
        if pick < 0.76:
            names = self.names([0, 1, 1, 2, 3])
            most = max((self.kept(name).seal for name in names), default=0)
            return Seal(names, max(0, most + self.rng.choice([-2, 0, 1, 1, 2, 2, 3, 5])))
        sinces = [(name, self.since(self.kept(name))) for name in self.names([0, 1, 1, 2])]
        return Allow(tuple(sinces))

    def kept(self, name: str) -> Kept:
        return self.model.streams.get(name, Kept())

    def since(self, kept: Kept) -> int:
        ahead = max(kept.since, kept.seal)
        near = [kept.since - 1, kept.since, kept.since + 1, kept.since + 3, kept.seal - 1, kept.seal + 2]
        return max(0, self.rng.choice([*near, *[ahead] * 6]))

    def names(self, sizes: list[int]) -> tuple[str, ...]:
        return tuple(self.name() for _ in range(self.rng.choice(sizes)))

    def rows(self, name: str) -> tuple[Row, ...]:
        rng, (key, val), seal = self.rng, TYPES[kind_of(name)], self.kept(name).seal
        early = -3 if rng.random() < 0.04 else 0
        return tuple(
            (
                rng.choice(VALUES[key]),
                rng.choice(VALUES[val][:2]),
                max(0, seal + rng.choice([0, 0, 1, 2, 3, 5, 9]) + early),
                rng.choice([-2, -1, -1, 1, 1, 1, 3]),
            )
            for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 12] if rng.random() < 0.6 else [1, 2]))
        )

    # --- what is done --------------------------------------------------------------------------------

    async def act(self) -> None:
        if self.owner is None:
            await self.rng.choice([self.open_owner, self.open_owner, self.reader_looks])()
            return
        if not self.decided and self.rng.random() < 0.5:
            await self.look_at_all()
        acts = [
            *[self.act_command] * 22,
            *[self.act_together] * 7,
            *[self.act_step] * 7,
            *[self.act_compact] * 6,
            *[self.owner_looks] * 5,
            *[self.reader_looks] * 4,
            *[self.act_listen] * 3,
            *[self.act_take] * 6,
            *[self.act_again] * 3,
            *[self.act_cut_off] * 2,
            self.act_maintain,
            self.act_sweep,
            *[self.act_ghost] * 3,
            *[self.rng.choice([self.act_crash, self.act_take_over, self.act_stop])] * 1,
            self.act_storm,
            *[self.act_doubt] * (4 if self.faulty else 0),
            self.act_descriptions,
        ]
        await self.rng.choice(acts)()

    async def act_command(self) -> None:
        assert self.owner is not None
        command, self.segment = self.command(), self.segment + 1
        self.note(f"{command}")
        batch = self.next_batch(command)
        result = await self.outcome(self.owner, command)
        self.story[-1] += f" -> {result}"
        self.judge([command], [result])
        if batch is not None and result[0] == "seqno" and self.decided:
            await self.check_batches(batch)

    async def act_together(self) -> None:
        """Several calls at once: they take their seqnos in this order."""
        assert self.owner is not None
        commands = self.several(2)
        self.note(f"together {commands}")
        results = await asyncio.gather(*(self.outcome(self.owner, command) for command in commands))
        self.story[-1] += f" -> {results}"
        self.judge(commands, results)
        self.check_looks(commands, results)

    def several(self, least: int) -> list[Any]:
        self.segment += 1
        many = range(self.rng.randint(least, 6))
        return [Look(self.name()) if self.rng.random() < 0.15 else self.command() for _ in many]

    async def act_cut_off(self) -> None:
        """Calls that are cancelled on the way."""
        assert self.owner is not None
        commands = [c for c in self.several(1) if not isinstance(c, Look)]
        tasks = [asyncio.create_task(self.outcome(self.owner, command)) for command in commands]
        await spin(self.rng.randrange(12))
        for task in tasks:
            if self.rng.random() < 0.6:
                task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        results = [("cancelled", r) if isinstance(r, asyncio.CancelledError) else r for r in done]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        barrier = Destroy("s98")
        answer = await self.outcome(self.owner, barrier)
        self.rude = True
        self.note(f"cut off {commands} -> {results}")
        self.judge([*commands, barrier], [*results, answer])

    async def act_crash(self) -> None:
        """Kill the owner, perhaps in the middle of commands."""
        assert self.owner is not None
        commands = [c for c in self.several(1) if not isinstance(c, Look)] if self.rng.random() < 0.7 else []
        tasks = [asyncio.create_task(self.outcome(self.owner, command)) for command in commands]
        stepping = asyncio.create_task(self.careless_step(self.owner))
        await spin(self.rng.randrange(25))
        self.owner.line.is_cut = True
        for task in (*tasks, stepping):
            task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(stepping, return_exceptions=True)
        results = [("gone",) if isinstance(r, asyncio.CancelledError) else r for r in done]
        for result in results:
            if isinstance(result, BaseException):
                raise result
        await self.kill(self.owner)
        self.rude = True
        self.note(f"crash {commands} -> {results}")
        self.judge(commands, results)
        self.decide(expand=True)
        self.owner = None

    async def careless_step(self, player: Player) -> None:
        if self.rng.random() < 0.5:
            try:
                await player.ix.step()
            except ap.Error:
                assert self.faulty

    async def act_take_over(self) -> None:
        """Another one opens, while commands of the old one are on their way."""
        assert self.owner is not None
        if self.ghost is not None:
            await self.kill(self.ghost)
        self.ghost, commands = self.owner, [c for c in self.several(0) if not isinstance(c, Look)]
        calls = asyncio.gather(*(self.outcome(self.ghost, command) for command in commands))
        opening = self.open(background=self.rng.random() < 0.1)
        self.owner, results = await asyncio.gather(opening, calls)
        self.rude = True
        self.note(f"take over {commands} -> {results}")
        self.judge(commands, results)
        self.decide(expand=True)

    async def act_stop(self) -> None:
        """Stop the owner, with commands on their way."""
        assert self.owner is not None
        commands = [c for c in self.several(0) if not isinstance(c, Look)]
        tasks = [asyncio.create_task(self.outcome(self.owner, command)) for command in commands]
        await spin(self.rng.randrange(3))
        await self.close(self.owner)
        results = await asyncio.gather(*tasks)
        self.note(f"stop {commands} -> {results}")
        self.judge(commands, results)
        self.owner = None

    async def act_ghost(self) -> None:
        """What was taken over from changes nothing, and shows the past until it knows."""
        if self.ghost is None:
            return
        knew, choice = self.ghost.fenced, self.rng.random()
        if choice < 0.4:
            name = self.name()
            seen = await self.outcome(self.ghost, Look(name))
            assert seen[0] in ("Fenced", "failed") if knew else True, seen
            assert seen[0] in ("Fenced", "failed") or self.was_possible(name, seen), seen
        elif choice < 0.8:
            command = self.command()
            seen = await self.outcome(self.ghost, command)
            idle = isinstance(command, Register | Destroy) and seen[0] in ANSWERS and not knew
            assert seen[0] in (("Fenced",) if knew else ("Fenced", "failed", "unknown")) or idle, (
                command,
                seen,
            )
            if idle and isinstance(command, Destroy):
                assert seen != ("done", True)
        else:
            await self.ghost_steps(self.ghost, knew)
        self.note(f"ghost {choice:.1f} {knew}")
        if self.ghost.fenced:
            await self.check_fenced(self.ghost)

    async def check_fenced(self, ghost: Player) -> None:
        """Its listeners end and say so, and so does every call."""
        calls = [
            ghost.ix.step(),
            ghost.ix.load("s0", str, int),
            ghost.ix.inspect("s0"),
            ghost.ix.destroy("s0"),
        ]
        told = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(each, Fenced) for each in told), told
        for listening in ghost.listeners:
            told = await asyncio.gather(drained(listening.events), return_exceptions=True)
            assert isinstance(told[0], Fenced | ap.LeaseExpired) or listening.name in self.model.destroyed, (
                told
            )
        ghost.listeners = []

    async def ghost_steps(self, ghost: Player, knew: bool) -> None:
        try:
            await ghost.ix.step()
        except Fenced:
            ghost.fenced = True
        except (*TRANSIENT, ap.LeaseExpired, ap.BatchExpired):
            assert self.faulty or self.shaky
        else:
            assert not knew

    async def act_maintain(self) -> None:
        """Maintenance by another client."""
        client = await self.maintainer()
        try:
            report = await client.maintain()
            assert self.faulty or not report.failures, report
        except TRANSIENT:
            assert self.faulty
        await client.aclose()
        self.note("maintain")

    async def act_sweep(self) -> None:
        client = await self.maintainer()
        try:
            swept = await client.sweep_leaked_blobs(dry_run=False)
            self.counts["blobs swept"] += len(swept.keys)
        except TRANSIENT:
            assert self.faulty
        await client.aclose()
        self.note("sweep")

    async def maintainer(self) -> Any:
        while True:
            try:
                return await self.opened_client(Wire(self.faults, self.lag))
            except TRANSIENT:
                assert self.faulty

    async def act_storm(self) -> None:
        """A store that is gone for a moment, or requests that land late."""
        if not self.faulty:
            return
        await self.faults.land()
        for op in self.rng.sample(["compare_and_set", "scan", "head", "set", "get_range", "delete"], 2):
            self.faults.fail_next(op, self.rng.choice([*RATES]), self.rng.randint(1, 4))
        self.note("storm")

    async def act_doubt(self) -> None:
        """A commit whose outcome is not known for a while."""
        lost = self.rng.choice([Outcome.LOST, Outcome.LOST, Outcome.LATE, Outcome.DROPPED])
        self.faults.fail_next("compare_and_set", lost)
        self.faults.fail_next("scan", Outcome.REFUSED, self.rng.choice([0, 1, 2]))
        self.note(f"doubt {lost}")
        await self.rng.choice([self.act_command, self.act_together, self.act_step, self.act_compact])()
        if self.rng.random() < 0.5:
            await self.faults.land()

    # --- reading -------------------------------------------------------------------------------------

    async def owner_looks(self) -> None:
        assert self.owner is not None
        await self.look(self.owner)

    async def look_at_all(self) -> None:
        """To decide what is possible."""
        assert self.owner is not None
        for name in {name: None for w in self.worlds for name in w.model.streams}:
            self.saw(name, await self.outcome(self.owner, Look(name)))

    async def reader_looks(self) -> None:
        if self.reader is None or self.rng.random() < 0.05:
            if self.reader is not None:
                await self.close(self.reader)
            self.reader = await self.open(readonly=True)
            refusals = await asyncio.gather(self.reader.ix.step(), return_exceptions=True)
            assert isinstance(refusals[0], ap.InvalidUsage)
        await self.look(self.reader)

    async def look(self, player: Player) -> None:
        name = self.name()
        try:
            snapshot = await player.ix.snapshot(stream(name))
        except UnknownStream:
            self.saw(name, ("UnknownStream",))
            return
        except TRANSIENT:
            assert self.faulty
            return
        seen = await self.read_carefully(snapshot)
        self.note(f"look {name} owner={player is self.owner} {seen}")
        self.saw(name, seen)
        if seen[0] != "failed":
            await self.check_unsealed(name, snapshot)
        if seen[0] != "failed" and len(player.snapshots) < 2 and self.rng.random() < 0.3:
            player.snapshots.append((snapshot, name, seen))
        else:
            await snapshot.aclose()

    async def read_carefully(self, snapshot: Any) -> Any:
        try:
            return await self.read(snapshot)
        except TRANSIENT:
            assert self.faulty
        except ap.LeaseExpired:
            assert self.shaky
        return ("failed",)

    async def check_unsealed(self, name: str, snapshot: Any) -> None:
        """Unsealed updates are there as they came; the updates of the trace are before the seal."""
        if not self.decided:
            return
        kept = self.model.streams[name]
        try:
            beyond = (await snapshot.unsealed_rows(snapshot.seal)).rows()
            trace = (await snapshot.trace_rows()).rows()
        except TRANSIENT:
            assert self.faulty
            return
        assert [tuple(row) for row in beyond] == [row for row in kept.rows if row[2] >= kept.seal]
        assert all(time < max(kept.seal, kept.since + 1) for _, _, time, _ in trace)

    async def act_again(self) -> None:
        """A snapshot shows the same for as long as it is open, beside any other work."""
        held = [
            (player, entry)
            for player in (self.owner, self.reader, self.ghost)
            if player is not None
            for entry in player.snapshots
        ]
        if not held:
            return
        player, entry = self.rng.choice(held)
        snapshot, name, before = entry
        seen = await self.read_carefully(snapshot)
        self.note(f"again {name}")
        assert seen in (("failed",), before), (name, seen, before)
        if self.rng.random() < 0.3:
            player.snapshots.remove(entry)
            await snapshot.aclose()

    async def act_descriptions(self) -> None:
        """`description` and `load` say what is there."""
        player = self.rng.choice([p for p in (self.owner, self.reader) if p is not None])
        if not self.decided:
            return
        name = self.name()
        key, val = TYPES[kind_of(name)]
        try:
            found = await player.ix.load(name, key, val)
            assert (found is not None) == (name in self.model.streams), (name, found)
        except UnknownStream:
            assert name in self.model.destroyed
        except TRANSIENT:
            assert self.faulty
        try:
            said = await player.ix.description(name)
            kept = self.model.streams[name]
            assert (said.lower.time, said.upper.time, said.since.time) == (0, kept.seal, kept.since), said
        except UnknownStream:
            assert name not in self.model.streams
        except TRANSIENT:
            assert self.faulty

    # --- listeners -----------------------------------------------------------------------------------

    async def act_listen(self) -> None:
        player, name = self.rng.choice([p for p in (self.owner, self.reader) if p is not None]), self.name()
        if name not in self.model.streams or not self.decided or len(player.listeners) > 3:
            return
        try:
            snapshot, events = await player.ix.listen(stream(name))
        except TRANSIENT:
            assert self.faulty
            return
        self.note(f"listen {name} owner={player is self.owner}")
        owners = player is self.owner
        player.listeners.append(Listening(name, events, snapshot.seqno, snapshot.seal.time, owners=owners))
        async with snapshot:
            self.saw(name, await self.read_carefully(snapshot))

    async def act_take(self, *, every: bool = False) -> None:
        """Listeners have been told exactly what came after their snapshots."""
        if not self.decided:
            return
        for player in (self.owner, self.reader):
            for listening in [*(player.listeners if player is not None else [])]:
                if not every and self.rng.random() < 0.5:
                    continue
                if not await self.take(listening):
                    assert player is not None
                    player.listeners.remove(listening)
                    await listening.events.aclose()

    async def take(self, of: Listening) -> bool:
        """All that is to be taken now; whether it goes on."""
        log = [told for told in self.model.log if told.name == of.name]
        log = [told for told in log if told.seqno > of.start or told.what == "end"][of.taken :]
        of.taken += len(log)
        ends = any(told.what == "end" for told in log)
        segments = [[*many] for _, many in groupby((t for t in log if t.what != "end"), lambda t: t.segment)]
        most = self.settings.listen_queue_max
        must = of.owners and self.least_commits(of, segments) > most
        may = sum(map(len, segments)) > most
        try:
            for many in segments:
                await self.take_segment(of, many)
            rest = await self.next_event(of, wanted=ends)
        except ap.LeaseExpired:
            assert may or self.shaky, f"the listener of {of.name} is not behind"
            self.counts["behind"] += 1
            return False
        assert not must, f"the listener of {of.name} is {len(segments)} commits behind"
        assert rest is (StopAsyncIteration if ends else None), rest
        self.counts["told"] += len(segments)
        return not ends

    def least_commits(self, of: Listening, segments: list[list[Told]]) -> int:
        """In how many commits these were at least that there is anything to tell of."""
        seal, least = of.seal, 0
        for many in segments:
            last = max((told.data for told in many if told.what == "seal"), default=seal)
            least += last > seal or any(told.what == "rows" for told in many)
            seal = last
        return least

    async def take_segment(self, of: Listening, many: list[Told]) -> None:
        """Concurrent calls are told in one commit or several, in order."""
        rows = [row for told in many if told.what == "rows" for row in told.data]
        seals = [told.data for told in many if told.what == "seal"]
        alone, got = len({told.seqno for told in many}) == 1, 0
        while got < len(rows) or (seals and of.seal != seals[-1]):
            event = await self.next_event(of, wanted=True)
            if isinstance(event, Records):
                came = [tuple(row) for row in event.updates.rows()]
                assert came, "an event without updates"
                assert came == rows[got : got + len(came)], (of.name, came, rows[got:])
                assert not alone or len(came) == len(rows)
                got += len(came)
            else:
                assert isinstance(event, Sealed), event
                assert event.time in seals and event.time >= of.seal, (event, seals, of.seal)
                assert not alone or got == len(rows)
                of.seal = event.time

    async def next_event(self, of: Listening, *, wanted: bool) -> Any:
        """The next event, or that it ended; `None` if nothing comes that is not wanted."""
        for attempt in range(1000):
            task = asyncio.ensure_future(anext(of.events))
            for turn in range(SPINS * (4 if wanted else 1)):
                if task.done():
                    break
                await asyncio.sleep(0 if turn < SPINS else 0.001)
            if not task.done():
                task.cancel()
            try:
                return await task
            except StopAsyncIteration:
                return StopAsyncIteration
            except asyncio.CancelledError:
                assert not wanted, f"the listener of {of.name} is told nothing"
                return None
            except TRANSIENT:
                assert self.faulty and attempt < 900
        raise AssertionError("nothing but failures")

    # --- maintenance --------------------------------------------------------------------------------------

    async def views(self, player: Player) -> dict[str, Any] | None:
        """All streams from within; `None` where that says nothing."""
        if player.background or not self.decided:
            return None
        try:
            return {name: await player.ix.inspect(name) for name in self.model.streams}
        except TRANSIENT:
            assert self.faulty
            return None

    def next_batch(self, command: Any) -> dict[str, tuple[int, int, int, int]] | None:
        """The unsealed batches that the command makes, if it is alone."""
        if not isinstance(command, Write) or not self.decided:
            return None
        after, before = self.model.copy(), self.model
        if after.run(command, 0)[0] != "seqno":
            return None
        times: dict[str, list[int]] = {}
        for name, rows in command.entries:
            times.setdefault(name, []).extend(row[2] for row in rows)
        return {
            name: (before.streams[name].seqno, after.seqno, min(some), max(some))
            for name, some in times.items()
            if some
        }

    async def check_batches(self, batch: dict[str, tuple[int, int, int, int]]) -> None:
        assert self.owner is not None
        views = await self.views(self.owner)
        for name, expected in batch.items() if views is not None else ():
            assert views is not None
            last = views[name].unsealed[-1]
            if name in self.shared:
                assert expected[0] <= last[0] < last[1], (last, expected)
                expected = (last[0], *expected[1:])
            assert last == expected, (last, expected)
            self.shared.discard(name)

    async def act_step(self) -> None:
        player = self.owner
        assert player is not None
        before = await self.views(player)
        try:
            requests = await player.ix.step()
        except (*TRANSIENT, ap.BatchExpired, ap.LeaseExpired) as error:
            self.note(f"step failed {error!r:.60}")
            assert self.faulty or self.shaky
            return
        self.note(f"step {requests}")
        after = await self.views(player)
        if before is not None and after is not None:
            for name in self.model.streams:
                self.check_step(name, before[name], after[name])
            self.check_requests(player, after, {request.stream: request for request in requests})
        player.flights |= {request.stream: request for request in requests}

    def check_step(self, name: str, before: Any, after: Any) -> None:
        """Drained, evicted, and one batch trimmed."""
        self.check_view(name, after)
        kept = self.model.streams[name]
        moved = [row for row in kept.rows if before.trace_upper <= row[2] < kept.seal]
        trace, upper = list(before.trace), before.trace_upper
        if moved:
            trace.append((upper, kept.seal, 0, 0, len(summed(moved))))
            upper = kept.seal
        assert after.trace == trace, (name, before, after)
        above = [b for b in before.unsealed if b[3] >= upper]
        partly = [b for b in above if b[2] < upper]
        if partly:
            at = above.index(partly[0])
            least = min(r[2] for r in kept.rows if upper <= r[2] <= partly[0][3])
            assert after.unsealed[at][2] >= max(least, upper), (name, before, after)
            above[at] = (*partly[0][:2], after.unsealed[at][2], partly[0][3])
        assert after.unsealed == above, (name, before, after)

    def check_view(self, name: str, view: Any) -> None:
        """What the rules promise at every moment."""
        kept = self.model.streams[name]
        assert (view.seal, view.since) == (kept.seal, kept.since), (name, view)
        assert view.trace_upper == (view.trace[-1][1] if view.trace else 0) <= view.seal
        assert all(a[1] == b[0] and a[3] >= b[3] for a, b in pairwise(view.trace)), view
        assert all(lower < upper and since <= kept.since for lower, upper, since, _, _ in view.trace), view
        assert all(a[1] <= b[0] for a, b in pairwise(view.unsealed)), view
        assert all(b[0] < b[1] and b[2] <= b[3] for b in view.unsealed), view
        rows = [row for row in kept.rows if row[2] < view.trace_upper]
        assert sum(b[4] for b in view.trace) >= len(summed(rows, kept.since)), view

    def pair_of(self, view: Any) -> tuple[Any, Any] | None:
        """The two batches that are to be one."""
        pairs = [(a, b) for a, b in pairwise(view.trace) if a[3] == b[3] and b[1] <= view.since]
        return pairs[0] if pairs else None

    def check_requests(self, player: Player, views: dict[str, Any], asked: dict[str, Any]) -> None:
        for name, view in views.items():
            wanted = self.pair_of(view) is not None and name not in player.flights
            assert (name in asked) == wanted, (name, view, asked)
            assert view.in_flight == (wanted or name in player.flights), (name, view)

    async def act_compact(self) -> None:
        """Carry out a compaction; hand in the result, an error, both, or something old."""
        player, choice = self.owner, self.rng.random()
        assert player is not None
        if self.responses and choice < 0.2:
            await self.hand_in(player, *self.rng.choice(self.responses))
            return
        if player.flights and choice < 0.3:
            await self.hand_in(player, self.rng.choice([*player.flights]), OSError("it failed"))
            return
        if not player.flights:
            await self.act_step()
            if self.rng.random() < 0.3:
                return
        if player.background or not player.flights:
            return
        name = self.rng.choice([*player.flights])
        try:
            response = await player.ix.compact(player.flights[name])
        except TRANSIENT:
            assert self.faulty
            return
        except UnknownStream:
            assert name not in self.model.streams or not self.decided
            player.flights.pop(name)
            return
        self.rude = True
        self.responses = [*self.responses[-3:], (name, response)]
        if self.rng.random() < 0.25:  # an error is told first, and it is asked for again
            await self.hand_in(player, name, OSError("it failed"))
            await self.act_step()
        for _ in range(self.rng.choice([0, 1, 1, 1, 2])):
            await self.hand_in(player, name, response)

    async def hand_in(self, player: Player, name: str, response: Any) -> None:
        before, unexpected = await self.views(player), player.ix.counters()["unexpected_responses"]
        done = player.ix.counters()["compactions"]
        failed = isinstance(response, OSError)
        fits = name in player.flights and (failed or response.request is player.flights[name])
        self.note(f"hand in {name} fits={fits} failed={failed}")
        try:
            await player.ix.apply(name, response)
        except TRANSIENT:
            assert self.faulty
            if fits:
                del player.flights[name]
            return
        if fits:
            del player.flights[name]
        after, counters = await self.views(player), player.ix.counters()
        if player.background or before is None or after is None:
            return
        there = name in self.model.streams
        assert counters["unexpected_responses"] - unexpected == (not fits or not there), (name, fits)
        assert counters["compactions"] - done == (fits and there and not failed)
        changed = {n: view for n, view in after.items() if view.trace != before[n].trace}
        assert set(changed) == ({name} if fits and there and not failed else set()), (before, after)
        if changed:
            self.counts["compacted"] += 1
            self.check_merged(name, response, before[name], after[name])

    def check_merged(self, name: str, response: Any, before: Any, after: Any) -> None:
        """Two neighbours of one level became one; how high it is depends on what is left."""
        self.check_view(name, after)
        at = next(n for n, (a, b) in enumerate(zip(before.trace, [*after.trace, None])) if a != b)
        (old, young), merged = before.trace[at : at + 2], after.trace[at]
        rows = [row for row in self.model.streams[name].rows if old[0] <= row[2] < young[1]]
        updates = len(summed(rows, merged[2]))
        level = old[3] + (updates > old[4] and updates > young[4])
        assert merged == (old[0], young[1], merged[2], level, updates), (before, after)
        assert old[3] == young[3] and young[1] <= merged[2] <= before.since
        assert after.trace == [*before.trace[:at], merged, *before.trace[at + 2 :]]
        assert after.unsealed == before.unsealed

    # --- from the beginning to the end ---------------------------------------------------------------

    async def play(self) -> None:
        first = await self.maintainer()
        refused = await asyncio.gather(first.indexed(NAME, readonly=True), return_exceptions=True)
        assert isinstance(refused[0], UnknownStream)
        await first.aclose()
        if self.faulty:
            self.faults.rates = {
                outcome: rate * self.rng.choice([0.2, 1, 2]) for outcome, rate in RATES.items()
            }
        self.keep(self.worlds, "")
        await self.open_owner()
        for _ in range(self.rng.choice([20, 50, 50, 90])):
            await self.act()
        await self.verify()

    async def verify(self) -> None:
        """Once the stores are well every promise holds: for instances that were open, and for new ones."""
        self.faults.heal()
        await self.faults.land()
        self.note("end")
        if self.owner is None:
            await self.open_owner()
        assert self.owner is not None
        self.segment += 1
        command = Seal((), 0)
        self.judge([command], [await self.outcome(self.owner, command)])
        await self.check_all(self.owner)
        await self.act_take(every=True)
        self.make_alike()
        await self.check_held()
        await self.check_same(self.owner)
        for player in (self.ghost, self.reader, self.owner):
            if player is not None:
                await self.close(player)
        self.ghost = self.reader = None
        self.dice.jump(1e5)
        self.owner = await self.open()
        await self.check_all(self.owner)
        await self.work_off()
        await self.check_all(self.owner)
        await self.close(self.owner)
        self.dice.jump(1e5)
        await self.check_blobs()
        self.owner = await self.open(readonly=True)
        await self.check_all(self.owner)
        await self.close(self.owner)

    async def check_all(self, player: Player) -> None:
        """Every stream that there is or was; only what was committed."""
        possible = {name for w in self.worlds for name in (*w.model.streams, *w.model.destroyed)}
        for name in [*sorted(possible), "s98"]:
            self.saw(name, await self.outcome(player, Look(name)))
        for name in sorted(self.model.destroyed):
            for call in (
                player.ix.load(name, str, int),
                player.ix.description(name),
                player.ix.inspect(name),
            ):
                refused = await asyncio.gather(call, return_exceptions=True)
                assert isinstance(refused[0], UnknownStream), refused
        for name, kept in self.model.streams.items():
            view = await player.ix.inspect(name)
            assert (view.seal, view.since) == (kept.seal, kept.since)

    async def check_held(self) -> None:
        for player in (self.owner, self.reader):
            for snapshot, name, before in player.snapshots if player is not None else ():
                assert await self.read(snapshot) == before, name
                await snapshot.aclose()

    async def check_same(self, owner: Player) -> None:
        """What the owner has in memory is what is durable."""
        reader = await self.open(readonly=True)
        for name in self.model.streams:
            durable = await reader.ix.inspect(name)
            for _ in range(100 if owner.background else 1):
                mine = await owner.ix.inspect(name)
                if mine.model_copy(update={"in_flight": False}) == durable:
                    break
                durable = await reader.ix.inspect(name)
            assert mine.model_copy(update={"in_flight": False}) == durable
        await self.close(reader)

    async def work_off(self) -> None:
        """Step and compact until nothing is left to be done: few batches, falling levels."""
        player = self.owner
        assert player is not None
        for _ in range(200):
            requests = await player.ix.step()
            for request in requests:
                await player.ix.apply(request.stream, await player.ix.compact(request))
            views = await self.views(player)
            assert views is not None
            if not requests and not any(b[2] < v.trace_upper for v in views.values() for b in v.unsealed):
                break
        else:
            raise AssertionError("there is always more to do")
        for name, view in views.items():
            self.check_view(name, view)
            assert self.pair_of(view) is None
            left = [row for row in self.model.streams[name].rows if row[2] >= view.trace_upper]
            assert not self.exact or all(row[2] >= view.seal for row in left), (name, view)
        await self.check_steps_are_free(player)

    async def check_steps_are_free(self, player: Player) -> None:
        """With nothing to do it touches no store."""
        for _ in range(3):
            before = {op: m.count for op, m in player.client.metrics.items()}
            assert await player.ix.step() == []
            after = {op: m.count for op, m in player.client.metrics.items()}
            if before == after:
                return
        raise AssertionError("a step with nothing to do asks the stores")

    async def check_blobs(self) -> None:
        """Every blob has a name in a state, and every named blob exists."""
        client = await self.maintainer()
        while (await client.maintain()).did_something:
            pass
        swept = await client.sweep_leaked_blobs(dry_run=False)
        self.counts["blobs leaked"] += len(swept.keys)
        assert self.rude or not swept.keys, swept
        usage = await client.usage()
        assert usage.total == usage.referenced, usage
        assert usage.referenced == usage.current, usage
        (found,) = await list_shards(client._stack)
        state = await load(client._stack, found)
        assert state is not None
        there = {key async for key, _ in self.blob.list(found)}
        named = live_parts(state) | {rollup.key for rollup in state.rollups.values()}
        assert there == named, (there - named, named - there)
        assert not state.readers and not state.writers
        assert state.streams is not None
        assert state.streams.owner == ""
        await client.aclose()


async def slow(rows: tuple[Row, ...]) -> AsyncIterator[Row]:
    for row in rows:
        await asyncio.sleep(0)
        yield row


async def drained(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def aiter_of(items: Iterable[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item


async def play(seed: int, *, faulty: bool) -> Counter[str]:
    """One game; what happened in it, by kind."""
    game = Game(seed, faulty=faulty)
    try:
        with no_threads(game.lag):
            async with asyncio.timeout(50):
                await game.play()
    except BaseException as error:
        error.add_note(f"seed {seed}, faulty={faulty}: {game.settings!r}")
        error.add_note("\n".join(game.story[-25:]))
        raise
    return game.counts
