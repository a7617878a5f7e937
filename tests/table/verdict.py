"""The end of a game: the outcome of each id, the updates of the shards, and whether all of it is right."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import aiopersist as ap
from tests.porcupine.histories import write_down
from tests.table.history import Began, Event, Op, Settled, ops_of
from tests.table.moves import ACCOUNTS, ACCOUNTS_AT_FIRST, JOURNAL, KEYS, OPENING, TABLES, balance
from tests.table.serializable import check
from tests.table.versions import Versions

TOTAL = OPENING * len(ACCOUNTS) * len(KEYS)
SCHEMA: ap.Schema[str, str, int] = ap.Schema(str, str)


async def verify(
    client: ap.Client, events: Sequence[Event], name: str, *, cuts: int | None = None
) -> list[Op]:
    """Raise `AssertionError` unless the history is right, by a client that saw nothing of it. All calls have
    ended, and nothing is on its way any more. `name`: of the game, for a judge from outside. `cuts`: at how
    many commit times all tables are read; `None`: at all."""
    settled = [Settled(*pair) for pair in await _outcomes(client, events)]
    ops = ops_of([*events, *settled])
    updates = {table: await updates_of(client, table) for table in (*TABLES, JOURNAL)}
    write_down(name, ops, updates)
    wrong = check(ops, updates)
    assert not wrong, "\n".join(wrong[:8])
    versions = Versions(updates)
    _check_journal(versions)
    await _check_cuts(client, versions, cuts)
    for table in (*TABLES, JOURNAL):
        report = await client.admin.fsck(table)
        assert report.ok, report.problems
    return ops


async def _outcomes(client: ap.Client, events: Iterable[Event]) -> list[tuple[str, int | None]]:
    moves = {event.op: event.move for event in events if isinstance(event, Began) and event.move.once}
    return [(name, await client.happened(move.once, move.shard)) for name, move in moves.items()]


async def updates_of(client: ap.Client, name: str) -> list[Any]:
    """All updates of a shard, as a listen brings them."""
    upper: Any = (await client.upper(name)).time
    found: list[Any] = []
    if upper:
        async with client.reader(name, SCHEMA) as reader, reader.listen(0, until=upper) as listen:
            async for step in listen.steps():
                found += list(step.updates)
    return found


def _check_journal(versions: Versions) -> None:
    """The balances are what its entries make, at each time."""
    balances = {key: balance(val) for key, val in ACCOUNTS_AT_FIRST.writes.items()}
    moved: dict[int, list[str]] = defaultdict(list)
    for time, changes in sorted(versions.at.items()):
        moved[time] += [entry for (table, _), entry in changes.items() if table == JOURNAL]
    for time in sorted(moved):
        for entry in moved[time]:
            accounts, _, amount = entry.partition("@")[0].rpartition(":")
            source, target = (tuple(account.split("/")) for account in accounts.split(">"))
            balances[source] -= int(amount)  # type: ignore[index]
            balances[target] += int(amount)  # type: ignore[index]
        there = {key: versions.val(key, time) for key in balances}
        if any(there.values()):
            assert {key: balance(val) for key, val in there.items()} == balances, time


async def _check_cuts(client: ap.Client, versions: Versions, cuts: int | None) -> None:
    """Read at one time, all tables are what they were then, and the balances sum to what they always do."""
    times = sorted(versions.at)
    step = 1 if cuts is None else max(len(times) // cuts, 1)
    tables = {name: client.table(name, key=str, val=str) for name in TABLES}
    uppers: dict[str, Any] = {name: (await client.upper(name)).time for name in TABLES}
    for time in times[::step]:
        total = 0
        for name, table in tables.items():
            if not uppers[name]:
                continue
            at = min(time, uppers[name] - 1)  # nothing came later
            found = dict([entry async for entry in table.items(as_of=at)])
            assert found == versions.entries(name, time), (name, time)
            total += sum(map(balance, found.values())) if name in ACCOUNTS else 0
        assert total == TOTAL, time
