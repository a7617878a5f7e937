"""Who loses races waits, and in the end lets the others know, and they let it go first.

Those that race for one key take requests from each other, and all but one of each round are in vain. So who
has lost twice in a row or more rests for a random time before it tries again, longer with each loss, as on a
line that many share. Meanwhile the others commit at full speed.

Who wins a race needs two requests until it can try again; who loses one needs five, and as many more as its
caller makes of a new state. So a writer that commits without a pause would win each time. After every eighth
refusal in a row, which few suffer where all have a chance, a loser leaves a *wish*, an object that lies where
the floors do: each commit lists these anyway. Its name says how long the loser has needed from a refusal to
its next try, and twice as long with each wish that was in vain. Who finds a wish that it has not heard before
pauses once for so long before its next commit to the key. Wishes decide nothing: they may be lost, or stay
when their writer is gone. The winner deletes its own, and a truncation deletes all.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from aiopersist.runtime import Runtime

WISHES_AFTER = 8  # refusals in a row, and again after as many
REQUESTS = 8  # that a loser needs, at most, from its wish to its commit
RESTS_AFTER = 2  # refusals in a row, since the last wish
REST_REQUESTS = 8  # that a rest takes at most, for each of them
LEAST_S = 0.01  # for what it does between them
MOST_S = 2.0
HEARD_MAX = 1000  # wishes, and keys whose last race was lost


@dataclass(slots=True)
class _Losing:
    """For a key, since the last commit of this handle."""

    refusals: int = 0
    last: int = -1
    """The version that was refused last."""
    refused_at: float | None = None
    """`None`: a rest follows, so the next try comes later than it could."""
    needs_s: float = 0.0
    """From a refusal to the next try, at most."""
    wishes: list[str] = field(default_factory=list)
    """The names of those that it has left."""


class Wishes:
    """What one handle knows of the wishes of others, and its own."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._races: dict[str, _Losing] = {}
        self._heard: dict[str, None] = {}
        self._pauses: dict[str, float] = {}
        """By key, the moment until which it lets others go first."""

    def tries(self, key: str) -> None:
        """A try begins."""
        race = self._races.get(key)
        if race is not None and race.refused_at is not None:
            race.needs_s = max(race.needs_s, self._runtime.monotonic() - race.refused_at)
            race.refused_at = None

    async def pause(self, key: str) -> None:
        """Let others go first, if they wish to."""
        until = self._pauses.pop(key, None)
        if until is not None and (left_s := until - self._runtime.monotonic()) > 0:
            await self._runtime.sleep(left_s)

    def refused(self, key: str, seqno: int, prefix: str) -> str | None:
        """Another one has committed version `seqno`: the name of a wish to leave, below `prefix`; `None` if
        it is not time for one."""
        race = self._races.pop(key, _Losing())
        self._races[key] = race  # the newest
        if len(self._races) > HEARD_MAX:
            del self._races[next(iter(self._races))]
        if seqno <= race.last:  # sent again, before its caller has looked
            return None
        race.refusals, race.last = race.refusals + 1, seqno
        race.refused_at = self._runtime.monotonic()
        if race.refusals % WISHES_AFTER:
            return None
        needs_s = min(race.needs_s * 2 ** len(race.wishes), MOST_S)
        wish = f"{prefix}{self._runtime.token()}-{int(1000 * needs_s)}"
        race.wishes.append(wish)
        return wish

    async def rest(self, key: str, request_s: float) -> bool:
        """After a lost race, let others commit; a request takes about so long. Whether it rested: no rest
        follows a wish, nor the try after it, which loses to what was on its way; the others wait then."""
        race = self._races.get(key)
        since_wish = race.refusals % WISHES_AFTER if race is not None else 0
        if race is None or since_wish < RESTS_AFTER:
            return False
        race.refused_at = None
        most_s = min(REST_REQUESTS * since_wish * request_s, MOST_S)
        await self._runtime.sleep(self._runtime.uniform(0, most_s))
        return True

    def won(self, key: str) -> list[str]:
        """A race was won: the names of the wishes that have come true."""
        race = self._races.pop(key, None)
        return race.wishes if race is not None else []

    def hear(self, key: str, wishes: Iterable[str], request_s: float) -> None:
        """A list shows these wishes; a request takes about so long."""
        mine = self._races[key].wishes if key in self._races else ()
        fresh = [wish for wish in wishes if wish not in self._heard and wish not in mine]
        if fresh:
            self._heard.update(dict.fromkeys(fresh))
            while len(self._heard) > HEARD_MAX:
                del self._heard[next(iter(self._heard))]
            pause_s = LEAST_S + REQUESTS * request_s + max(map(_needs_s, fresh))
            self._pauses[key] = self._runtime.monotonic() + min(pause_s, MOST_S)


def _needs_s(wish: str) -> float:
    """What a wish says; 0 for a name that is of no wish of this library."""
    told = wish.rpartition("-")[2]
    return int(told) / 1000 if told.isascii() and told.isdigit() and len(told) < 8 else 0.0
