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
   (`stand_back`). Who wishes itself stands back for those that have waited for longer.
3. Who has won goes on until its slot is over; then it stands back as others do.
4. Who is refused an append, since another one came first, has lost as well (`refused`): it reads, and plans
   the next append, which may take commits of other kinds, and these win. So that is counted by itself, until
   an append comes through, and the slot is as long as the caller needs from one append to the next.

So after a wish each other client commits once at most, or twice if it was about to: then all have heard.

Nothing rests on it: a wish may be lost, its client may be gone, and clients of older versions hear nothing.
Who goes on losing, as beside such a client, wishes less often.
"""

from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial

from aiopersist.shard.register import Register
from aiopersist.storage.wishes import slot_after


def begin(registers: Collection[Register]) -> None:
    """A try for all of these begins: what came before is no part of what it needs."""
    for register in registers:
        now = register.stack.runtime.monotonic()
        register.losses.tried_at = register.refusals.tried_at = now


async def lost(races: Mapping[Register, int | None]) -> None:
    """Other clients were first at one of these shards, after the version on which a commit was planned. If
    that happens again and again, ask them for a slot in all of them."""
    now = next(iter(races)).stack.runtime.monotonic()
    counted = [register.losses.lost(planned, now) for register, planned in races.items()]
    slot_s = max(register.losses.slot_s for register in races)
    if any(counted) and slot_s:
        await wish(races, slot_s, max(register.losses.waited_s(now) for register in races))


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
    long. One request, and one for each shard when it is over."""
    stack = next(iter(registers)).stack
    ahead_s = max(stack.consensus.stand_back_s(r.key, stack.name, waited_s) for r in registers)
    for_s = slot_after(ahead_s, slot_s)
    until = stack.runtime.monotonic() + for_s
    for register in registers:
        if not register.losses.slot_until:
            stack.supervisor.background(_withdrawn(register), "withdraw a wish")
        register.losses.slot_until = until
    await _tell(registers, for_s, waited_s)


async def _withdrawn(register: Register) -> None:
    """Once its slot is over: some stores would show it until the versions are truncated."""
    losses, runtime = register.losses, register.stack.runtime
    await runtime.sleep(0)
    while (left_s := losses.slot_until - runtime.monotonic()) > 0:
        await runtime.sleep(left_s)
    losses.slot_until = 0.0
    await _tell([register], 0.0, 0.0)


async def _tell(registers: Collection[Register], for_s: float, waited_s: float) -> None:
    stack = next(iter(registers)).stack
    with suppress(Exception):  # it decides nothing
        await stack.consensus.wish([register.key for register in registers], stack.name, for_s, waited_s)


async def stand_back(registers: Collection[Register]) -> float:
    """Let those commit first who wish it; for how long that took. No request."""
    waited_s = 0.0
    for register in registers:
        stack, losses = register.stack, register.losses
        if not stack.consensus.stand_back_s(register.key, stack.name, 0.0):  # nobody wishes anything
            continue
        others = partial(stack.consensus.stand_back_s, register.key, stack.name)
        now = stack.runtime.monotonic()
        if wait_s := losses.wait_s(others, now, register.refusals.waited_s(now)):
            waited_s += wait_s
            await stack.runtime.sleep(wait_s)
    for register in registers if waited_s else ():  # all of them have waited
        register.losses.waited(waited_s)
        register.refusals.waited(waited_s)
    return waited_s
