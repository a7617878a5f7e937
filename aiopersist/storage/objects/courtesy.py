"""Who loses races waits, and in the end lets the others know, and they let it go first.

Those that race for one key take requests from each other, and all but one of each round are in vain. So who
has lost twice in a row or more rests for a random time before it tries again, longer with each loss, as on a
line that many share. Meanwhile the others commit at full speed.

Who wins a race needs two requests until it can try again; who loses one needs five. So a writer that commits
without a pause would win each time. After every eighth loss in a row, which few suffer where all have a
chance, a loser leaves a *wish*, an object that lies where the floors do: each commit lists these anyway. Who
finds a wish that it has not heard before pauses once before its next commit to the key, for as long as the
loser needs. Wishes decide nothing: they may be lost, or stay when their writer is gone. The winner deletes
its own, and a truncation deletes all.
"""

from collections.abc import Iterable

from aiopersist.runtime import Runtime

WISHES_AFTER = 8  # losses in a row, and again after as many
REQUESTS = 8  # that a loser needs, at most, from its wish to its commit
RESTS_AFTER = 2  # losses in a row
REST_REQUESTS = 8  # that a rest takes at most, for each loss
LEAST_S = 0.01  # for what it does between them
MOST_S = 2.0
HEARD_MAX = 1000  # wishes, and keys whose last race was lost


class Wishes:
    """What one handle knows of the wishes of others, and its own."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._losses: dict[str, int] = {}
        self._mine: dict[str, list[str]] = {}
        """By key, the names of its own wishes."""
        self._heard: dict[str, None] = {}
        self._pauses: dict[str, float] = {}
        """By key, the moment until which it lets others go first."""

    async def pause(self, key: str) -> None:
        """Let others go first, if they wish to."""
        until = self._pauses.pop(key, None)
        if until is not None and (left_s := until - self._runtime.monotonic()) > 0:
            await self._runtime.sleep(left_s)

    def lost(self, key: str, prefix: str) -> str | None:
        """A race was lost: the name of a wish to leave, below `prefix`; `None` if it is not time for one."""
        losses = self._losses[key] = self._losses.pop(key, 0) + 1
        if len(self._losses) > HEARD_MAX:
            self.won(next(iter(self._losses)))
        if losses % WISHES_AFTER:
            return None
        wish = prefix + self._runtime.token()
        self._mine.setdefault(key, []).append(wish)
        return wish

    async def rest(self, key: str, request_s: float) -> None:
        """After a lost race, let others commit; a request takes about so long. No rest follows a wish: the
        others wait for it."""
        losses = self._losses.get(key, 0)
        if losses < RESTS_AFTER or losses % WISHES_AFTER == 0:
            return
        most_s = min(REST_REQUESTS * losses * request_s, MOST_S)
        await self._runtime.sleep(self._runtime.uniform(0, most_s))

    def won(self, key: str) -> list[str]:
        """A race was won: the names of the wishes that have come true."""
        self._losses.pop(key, None)
        return self._mine.pop(key, [])

    def hear(self, key: str, wishes: Iterable[str], request_s: float) -> None:
        """A list shows these wishes; a request takes about so long."""
        mine = self._mine.get(key, ())
        fresh = [wish for wish in wishes if wish not in self._heard and wish not in mine]
        if fresh:
            self._heard.update(dict.fromkeys(fresh))
            while len(self._heard) > HEARD_MAX:
                del self._heard[next(iter(self._heard))]
            pause_s = min(LEAST_S + REQUESTS * request_s, MOST_S)
            self._pauses[key] = self._runtime.monotonic() + pause_s
