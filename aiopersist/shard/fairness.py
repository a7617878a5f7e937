"""Lets those commit who lose race after race.

Who wins a race for a shard knows its newest state, and who loses one must read it first. So a client that is
near the store, and has enough to do, would win each time, and one that is far, or plans for long, would never
come through. A loser cannot ask for a turn by a commit, as it loses those. So it leaves a *wish* in the
consensus store, beside the versions, and the others hear of it in the answer to their own next commit: that
costs no request while nobody wishes anything.

1. Who has lost two races in a row leaves a wish after each further loss (`lost`). It asks for a *slot*:
   as long as a try of the loser takes, and a margin, after the slots of those that have waited for longer.
   A try is from one loss to the next, without what was waited for others, and not from before it began.
2. Who hears of wishes *stands back* until their slots are over, before its next commit to the shard
   (`yield_to_others`), and leaves a wish to be next. So all who have work go in turn, and lose no races:
   several clients together commit about as much as one. A slot lasts `LEAST_S` at least, since each turn
   begins with what the others have written.
3. Who has won goes on until its slot is over; then it stands back as others do.
4. Who is refused an append, since another one came first, has lost as well (`refused`): it reads, and plans
   the next append, which may take commits of other kinds, and these win. So that is counted by itself, until
   an append comes through, and the slot is as long as the caller needs from one append to the next.

So after a wish each other client commits once at most, or twice if it was about to: then all have heard.

Nothing rests on it: a wish may be lost, its client may be gone, and clients of older versions hear nothing.
Who goes on losing, as beside such a client, wishes less often.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from aiopersist.shard.register import Register
from aiopersist.storage.wishes import MARGIN, MOST_S, slot_after

WISHES_MAX = 2  # of one call: others may have wished at the same moment
LINGER_S = 0.25  # after the last slot of a client


def begin(registers: Collection[Register]) -> None:
    """A try for all of these begins: what came before is no part of what it needs."""
    for register in registers:
        now = register.stack.runtime.monotonic()
        register.losses.tried_at = register.refusals.tried_at = now


async def lost(races: Mapping[Register, int | None]) -> bool:
    """Other clients were first at these shards, after the version on which a commit was planned. If that
    happens again and again at some of them, ask them for a slot there. Whether it did: until they have heard
    of it they go on, so what came with the answer that the race is lost is old by then."""
    now = next(iter(races)).stack.runtime.monotonic()
    counted = [register.losses.lost(planned, now) for register, planned in races.items()]
    slots = {register: slot_s for register in races if (slot_s := register.losses.slot_s)}
    if not any(counted) or not slots:
        return False
    await wish(slots, max(slots.values()), max(register.losses.waited_s(now) for register in slots))
    return True


def refused(register: Register, expected: object) -> None:
    """An append at the upper `expected` was refused, since another client's came first. If that happens again
    and again, each time at another upper, ask the others for a slot, in the background: the caller is told
    at once, whatever becomes of the wish."""
    refusals, now = register.refusals, register.stack.runtime.monotonic()
    if expected == register.refused_at:  # its caller has not looked: no slot would help it
        return
    register.refused_at = expected
    refusals.lost(refusals.planned + 1, now)
    if slot_s := refusals.slot_s:
        wishing = wish([register], slot_s, refusals.waited_s(now))
        register.stack.supervisor.background(wishing, "wish to be next")


async def wish(registers: Collection[Register], slot_s: float, waited_s: float) -> None:
    """Ask other clients to commit nothing to these shards for so long, since this one has lost races for so
    long. One request, and one when all its slots are over."""
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
    """For how long those have slots that have waited for longer."""
    found = [r.stack.consensus.stand_back_s(r.key, r.stack.name, waited_s) for r in registers]
    return min(max(found), MOST_S)


async def _withdrawn(registers: Collection[Register]) -> None:
    """Once their slots are over: some stores would show it until the versions are truncated."""
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
    """Let those commit first who wish it; for how long that took. No request while nobody wishes anything;
    else one for a place behind them."""
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
    for register in registers:  # all of them have waited
        register.losses.waited(stood_s)
        register.refusals.waited(stood_s)
    return stood_s
