"""Turns for clients that lose race after race.

The winner of a race for a shard knows its newest state, but the loser must read it first. So a client that is
near the store, with enough work, would win each time, and a client that is far away, or plans for long, would
never commit. A loser cannot use a commit to ask for its turn. So it leaves a *wish* in the consensus store,
beside the versions. The others see the wish in the answer to their own next commit, which costs no request
while there are no wishes.

1. A client that has lost two races in a row leaves a wish after each further loss (`lost`). The wish asks for
   a *slot*: the time that the loser needs for a try, and a margin, after the slots of those that have waited
   longer. A try lasts from one loss to the next, without the waits for others, and not from before it began.
2. A client that sees wishes *stands back* before its next commit to the shard (`yield_to_others`), until
   their slots are over, and leaves a wish to be next. So all clients with work take turns and lose no races,
   and together they commit about as much as one. A slot lasts at least `LEAST_S`, since each turn begins with
   a read of the others' versions.
3. A winner continues until its slot is over; then it stands back like the others.
4. A client whose append is refused, because another one came first, has lost as well (`refused`). It reads,
   and plans the next append. In between it may win commits of other kinds. So refusals are counted
   separately, until an append succeeds, and the slot is the time from one append to the next.

So after a wish each other client commits at most once, or twice if a commit was under way.

Wishes decide nothing: a wish may be lost, its client may be gone, and clients of older versions see none. A
client that keeps losing, for example beside an old client, wishes less often.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from aiopersist.shard.register import Register
from aiopersist.storage.wishes import MARGIN, MOST_S, slot_after

WISHES_MAX = 2  # wishes in one call: others may wish at the same moment
LINGER_S = 0.25  # after the last slot of a client


def begin(registers: Collection[Register]) -> None:
    """A try for all of these shards begins: the slot need not cover the time before."""
    for register in registers:
        now = register.stack.runtime.monotonic()
        register.losses.tried_at = register.refusals.tried_at = now


async def lost(races: Mapping[Register, int | None]) -> bool:
    """Other clients committed to these shards after the version on which our commit was planned. If that
    happens repeatedly at some shards, ask for slots there. Returns whether it asked: the others continue
    until they see the wish, so the versions in the lost answer are old by then."""
    now = next(iter(races)).stack.runtime.monotonic()
    counted = [register.losses.lost(planned, now) for register, planned in races.items()]
    slots = {register: slot_s for register in races if (slot_s := register.losses.slot_s)}
    if not any(counted) or not slots:
        return False
    await wish(slots, max(slots.values()), max(register.losses.waited_s(now) for register in slots))
    return True


def refused(register: Register, expected: object) -> None:
    """An append at the upper `expected` was refused, since another client's came first. If that happens
    repeatedly, each time at another upper, ask for a slot in the background: the caller must not wait."""
    refusals, now = register.refusals, register.stack.runtime.monotonic()
    if expected == register.refused_at:  # its caller has not read the new upper: a slot would not help
        return
    register.refused_at = expected
    refusals.lost(refusals.planned + 1, now)
    if slot_s := refusals.slot_s:
        wishing = wish([register], slot_s, refusals.waited_s(now))
        register.stack.supervisor.background(wishing, "wish to be next")


async def wish(registers: Collection[Register], slot_s: float, waited_s: float) -> None:
    """Ask other clients not to commit to these shards for so long, since this one has lost races for so long.
    One request, and one more after its slots."""
    stack = next(iter(registers)).stack
    runtime = stack.runtime
    ahead_s = _ahead_s(registers, waited_s)
    for _ in range(WISHES_MAX):
        now, for_s = runtime.monotonic(), slot_after(ahead_s, slot_s)
        if new := [register for register in registers if not register.losses.slot_until]:
            stack.supervisor.background(_withdrawn(new), "withdraw wishes")
        for register in registers:
            register.losses.wished(now, waited_s, ahead_s, for_s)
        await _tell(registers, for_s, waited_s)
        waited_s += runtime.monotonic() - now
        told_s, ahead_s = ahead_s, _ahead_s(registers, waited_s)
        if ahead_s <= told_s:
            return


def _ahead_s(registers: Iterable[Register], waited_s: float) -> float:
    """How long the slots of the clients last that have waited longer."""
    slots = [r.stack.consensus.stand_back_s(r.key, r.stack.name, waited_s) for r in registers]
    return min(max(slots), MOST_S)


async def _withdrawn(registers: Collection[Register]) -> None:
    """Withdraw the wish after the slots: some stores would show it until the versions are truncated."""
    stack = next(iter(registers)).stack
    runtime = stack.runtime
    await runtime.sleep(0)
    while (left_s := max(r.losses.slot_until for r in registers) + LINGER_S - runtime.monotonic()) > 0:
        await runtime.sleep(left_s)
    for register in registers:
        register.losses.slot_until = 0.0
    await _tell(registers, 0.0, 0.0)


async def _tell(registers: Collection[Register], for_s: float, waited_s: float) -> None:
    stack = next(iter(registers)).stack
    with suppress(Exception):  # it decides nothing
        await stack.consensus.wish([register.key for register in registers], stack.name, for_s, waited_s)


async def yield_to_others(registers: Collection[Register]) -> float:
    """Let the clients with wishes commit first; returns the seconds that it took. No request while there are
    no wishes; else one, for a place behind them."""
    wished = [register for register in registers if _ahead_s([register], 0.0)]
    if not wished:
        return 0.0
    runtime = wished[0].stack.runtime
    began = runtime.monotonic()
    waited_s = max([max(r.losses.waited_s(began), r.refusals.waited_s(began)) for r in wished])
    ahead_s = _ahead_s(wished, waited_s)
    if not ahead_s or all(register.losses.has_turn(began) for register in wished):
        return 0.0
    if min([register.losses.slot_until for register in wished]) <= began + ahead_s:
        await wish(wished, MARGIN * max([register.losses.needs_s for register in wished]), waited_s)
        ahead_s = _ahead_s(wished, waited_s + runtime.monotonic() - began)
    await runtime.sleep(ahead_s)
    stood_s = runtime.monotonic() - began
    for register in registers:  # all registers have waited
        register.losses.waited(stood_s)
        register.refusals.waited(stood_s)
    return stood_s
