"""Migrations: each step works on a copy in memory, and becomes durable in one transaction with the version.

That transaction expects every collection to be as the step found it. So a step holds no lock while it
runs, and if others changed anything meanwhile it runs again, on what is there then.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiopersist.resource import Scope
from aiopersist.stash.errors import StashError
from aiopersist.stash.memory import DraftStore
from aiopersist.stash.model import Change, Loaded, Select
from aiopersist.stash.session import Session

if TYPE_CHECKING:
    from aiopersist.stash.stash import Transaction

Step = Callable[["Transaction"], Awaitable[Any]]

ATTEMPTS = 100  # of one step; a stash that never rests that long cannot be migrated


async def migrate(session: Session, steps: Sequence[Step], transaction: type["Transaction"]) -> int:
    """See `Stash.migrate`."""
    session.writing()
    for number, step in enumerate(steps):
        for _ in range(ATTEMPTS):
            found = await session.load(Select())
            _check(found.version, len(steps))
            if found.version > number:
                break
            change = await _draft(session, found, number, step, transaction)
            if await session.attempt(change):
                break
        else:
            raise StashError(f"migration step {number}: others changed the stash meanwhile, {ATTEMPTS} times")
    _check((await session.load(Select(ids=(), rows=False))).version, len(steps))
    return len(steps)


async def _draft(
    session: Session, found: Loaded, number: int, step: Step, transaction: type["Transaction"]
) -> Change:
    """What the step does to a copy of what was found."""
    store = DraftStore(found)
    scope = Scope(f"the transaction of migration step {number}")
    tx = transaction(session.draft(store, found), scope, _nothing)
    try:
        await step(tx)
    finally:
        await tx.aclose()
    return store.gathered((number, number + 1))


def _check(version: int, known: int) -> None:
    if version > known:
        raise StashError(f"the stash is at version {version}, but only {known} migration steps are known")


async def _nothing() -> None:
    """There is nothing to release."""
