"""The possible states. Where the answer to a command was lost several *worlds* are possible, until a read
decides."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from tests.indexed.game.model import ANSWERS, Allow, Destroy, Look, Model, Register, Seal, Write


@dataclass
class World:
    """A state that is possible, and what may become durable yet."""

    model: Model
    late: tuple[tuple[Any, int, int], ...] = ()
    """Commands, their segments, and their commits: of one commit all of them, or none."""
    past: tuple[Model, ...] = ()
    """Of the commands that are judged: the states on the way."""
    chosen: tuple[tuple[int, bool], ...] = ()
    """Of commands that share an unknown outcome, what it is here."""
    ended: bool = False
    """The process was killed before the rest."""

    def expanded(self) -> list["World"]:
        """This one, and those in which some of what is late has happened: in order."""
        worlds = [self]
        for group in dict.fromkeys(group for _, _, group in self.late):
            worlds += [each.landed(group) for each in worlds if any(late[2] == group for late in each.late)]
        return worlds

    def landed(self, group: int) -> "World":
        """That commit has happened; those before it never will."""
        model, at = self.model.copy(), max(n for n, late in enumerate(self.late) if late[2] == group)
        for command, segment, of in self.late:
            if of == group:
                model.run(command, segment)
        return World(model, self.late[at + 1 :])

    def after(self, command: Any, result: Any, segment: int) -> list["World"]:
        """The worlds in which a caller is told that."""
        what = result[0]
        if isinstance(command, Look) or what in ("failed", "Fenced", "Stopped"):
            return [self]
        did = self.model.copy()
        told = did.run(command, segment)
        if what in ANSWERS:
            late = () if told == result else self.late
            return [World(did, late, (*self.past, did), self.chosen)] if told == result else []
        with_it = World(did, self.late, (*self.past, did), self.chosen)
        if what == "gone":
            without = World(self.model, self.late, self.past, self.chosen, ended=True)
            return [self] if self.ended else [with_it, without]
        group = id(result[1]) if what == "unknown" else id(result)
        late = World(self.model, (*self.late, (command, segment, group)), self.past, self.chosen)
        if what == "cancelled":
            return [with_it, late]
        assert what == "unknown", result
        worlds = self._by_group(group, with_it, late)
        if isinstance(command, Destroy) and self._told(group):
            return [self]  # it stands alone: what it had to wait for failed, so it did nothing
        return [*worlds, self] if isinstance(command, Register) and self._told(group) else worlds

    def _told(self, group: int) -> bool:
        """Whether an earlier call has the same error."""
        return group in dict(self.chosen)

    def _by_group(self, group: int, with_it: "World", late: "World") -> list["World"]:
        """Those of one commit happened all, or none did."""
        chosen = dict(self.chosen).get(group)
        with_it.chosen = late.chosen = (*self.chosen, (group, True))
        late.chosen = (*self.chosen, (group, False))
        return [with_it, late] if chosen is None else [with_it] if chosen else [late]


class Possible:
    """The worlds that are possible now, and the states that were."""

    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts
        self.worlds = [World(Model())]
        self.known: dict[int, dict[Any, Model]] = {}
        """Every state that was possible at some time, by its seqno."""
        self.segment = 0
        """Which calls were made together."""
        self.shared: set[str] = set()
        """Streams whose last batch may be of several commands: where it ends is not known."""
        self.exact = True

    @property
    def model(self) -> Model:
        return self.worlds[0].model

    @property
    def is_decided(self) -> bool:
        return len(self.worlds) == 1 and not self.worlds[0].late

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
            assert result[0] == "UnknownStream" or result[0] >= least or not self.is_decided, (result, before)

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
