"""Migrations: each step works on a copy in memory, and becomes durable in one transaction with the version.

That transaction expects every collection to be as the step read it. So a step runs without a lock; if another
opener changes anything meanwhile, the step runs again on the new contents.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from aiopersist.base.resource import Resource, Scope
from aiopersist.stash.errors import StashError
from aiopersist.stash.memory import DraftStore
from aiopersist.stash.model import Loaded, Select
from aiopersist.stash.session import StashSession

T = TypeVar("T", bound=Resource)

ATTEMPTS = 100  # of one step; a stash that changes during each of them cannot be migrated


async def migrate(
    session: StashSession,
    steps: Sequence[Callable[[T], Awaitable[Any]]],
    begin: Callable[[StashSession, Scope], T],
) -> int:
    """See `Stash.migrate`; `begin` makes the stash that a step is given."""
    session.writing()
    version = _checked((await session.load(Select(ids=(), rows=False))).version, steps)
    failures = 0
    while version < len(steps):
        loaded = await session.load(Select())
        version = _checked(loaded.version, steps)
        if version == len(steps):
            break
        if await _done(session, loaded, version, steps[version], begin):
            version, failures = version + 1, 0
        elif (failures := failures + 1) == ATTEMPTS:
            raise StashError(
                f"migration step {version}: other openers changed the stash during each of {ATTEMPTS} tries: "
                "stop them, and migrate again"
            )
    return version


async def _done(
    session: StashSession,
    loaded: Loaded,
    number: int,
    step: Callable[[T], Awaitable[Any]],
    begin: Callable[[StashSession, Scope], T],
) -> bool:
    """Run the step on a copy of `loaded`, and make its changes durable; `False` if another opener has changed
    anything meanwhile."""
    draft = DraftStore(loaded)
    tx = begin(session.draft(draft, loaded), Scope(f"the transaction of migration step {number}"))
    try:
        await step(tx)
    finally:
        await tx.aclose()
    applied = await session.attempt(draft.gathered((number, number + 1)))
    for collection_id in draft.to_consolidate if applied else ():
        await session.consolidate(collection_id)
    return applied


def _checked(version: int, steps: Sequence[Any]) -> int:
    if version > len(steps):
        raise StashError(
            f"the stash is at version {version}, but only {len(steps)} migration steps were given: use the "
            "program that migrated it"
        )
    return version
