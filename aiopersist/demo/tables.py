"""`aiopersist demo --tables`: a bank in two tables and a journal.

Several processes with many tasks transfer amounts between random accounts, in transactions. An auditor in
another process consumes the journal with a subscription, and keeps the turnover of each account. It is killed
several times, and resumes after its last acknowledgement.

Then everything is checked:

- by the feeds of both tables, the balances have the same sum at every time of a commit;
- reads with `as_of=` at sampled times equal the feeds;
- the journal has every transfer once, and explains the last balances;
- the turnover is the sum of the journal: every entry counts once, even though the auditor was killed.
"""

import asyncio
import os
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from aiopersist.base.errors import InvalidLocation
from aiopersist.base.runtime import SYSTEM
from aiopersist.client.client import Client
from aiopersist.demo.bank import ACCOUNTS, BALANCE, TABLES, Bank, JournalEntry, Turnover
from aiopersist.demo.common import CheckFailed, DemoOptions, directory_of, opened, progress, say

TRANSFERS = 2_000  # without --limit
TELLERS = 3  # processes
KILLS = 3
SAMPLES = 12  # times at which both tables are read
LOOK_S = 0.1  # between two looks at the auditor's position
SILENCE_S = 120.0  # without progress, then the demo fails

Balances = dict[tuple[str, str], int]
"""By table and key."""


class BankDemo:
    """A run: this process opens the accounts, starts the others, and checks."""

    def __init__(self, client: Client, environment: dict[str, str], bars: Progress) -> None:
        self.run = SYSTEM.token()[:8]
        self.bank = Bank(client, self.run)
        self.client = client
        self.bars = bars
        self.kills = 0
        self.opened_at = 0
        self._environment = environment
        self._transferred = asyncio.Event()
        self._processes = AsyncExitStack()

    async def transfer_and_audit(self, transfers: int) -> None:
        """Run all processes until every transfer is made and audited."""
        async with self._processes:
            self.opened_at = await self.bank.open_accounts()
            async with await self.bank.journal():  # creates the journal before the auditor subscribes
                pass
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._audited(transfers))
                await self._tellers(transfers)
                self._transferred.set()

    async def _tellers(self, transfers: int) -> None:
        bar = self.bars.add_task("made", total=transfers)
        shares = [transfers // TELLERS + (n < transfers % TELLERS) for n in range(TELLERS)]
        processes = [await self._start("teller", str(n), share) for n, share in enumerate(shares)]
        async with asyncio.TaskGroup() as tasks:
            for process in processes:
                tasks.create_task(self._followed(process, bar))

    async def _followed(self, process: Process, bar: Any) -> None:
        assert process.stdout is not None
        async for _ in process.stdout:
            self.bars.advance(bar)
        if status := await process.wait():
            raise CheckFailed(f"a process that transfers ended with status {status}")

    async def _audited(self, transfers: int) -> None:
        """Keep an auditor running, and kill it after it made progress."""
        bar = self.bars.add_task("audited", total=transfers)
        auditor = await self._start("auditor", "auditor", 0)
        seen = None
        silent_since = SYSTEM.monotonic()
        while True:
            is_last = self._transferred.is_set()
            view = (await self.client.admin.subscriptions(self.bank.journal_name)).get("auditor")
            if view is not None and view.position != seen:
                is_first, seen, silent_since = seen is None, view.position, SYSTEM.monotonic()
                self.bars.update(bar, completed=await self._count_audited())
                if self.kills < KILLS and not is_first:
                    auditor.kill()
                    await auditor.wait()
                    self.kills += 1
                    auditor = await self._start("auditor", "auditor", 0)
            if is_last and view is not None and view.lag == 0:
                return
            if auditor.returncode is not None or SYSTEM.monotonic() - silent_since > SILENCE_S:
                raise CheckFailed("the auditor makes no progress")
            await SYSTEM.sleep(LOOK_S)

    async def _count_audited(self) -> int:
        return sum([turnover.transfers async for _, turnover in self.bank.turnover.items()]) // 2

    async def _start(self, role: str, name: str, transfers: int) -> Process:
        """Start a process of the bank. It is killed at the end if it still runs."""
        command = [sys.executable, "-m", "aiopersist.demo.bank_process", role, self.run, name, str(transfers)]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=PIPE if role == "teller" else DEVNULL, env=self._environment
        )
        self._processes.push_async_callback(_ended, process)
        return process

    # --- the checks ------------------------------------------------------------------------------

    async def check(self, transfers: int) -> int:
        """Check everything. Returns the number of times at which balances were summed."""
        changes = await self._changes()
        times = sorted(changes)
        sampled = {times[round(n * (len(times) - 1) / (SAMPLES - 1))] for n in range(SAMPLES)}
        bar = self.bars.add_task("checked", total=len(times))
        first: Balances = {}
        balances: Balances = {}
        for time in times:
            balances.update(changes[time])
            first = first or dict(balances)
            if sum(balances.values()) != len(TABLES) * ACCOUNTS * BALANCE:
                raise CheckFailed(f"the balances at time {time} sum to {sum(balances.values())}")
            if time in sampled:
                await self._check_as_of(time, balances)
            self.bars.advance(bar)
        await self._check_journal(first, balances, transfers)
        return len(times)

    async def _changes(self) -> dict[int, Balances]:
        """The new balances of both tables, by the time of their commit."""
        changes: dict[int, Balances] = {}
        for name, table in zip(TABLES, self.bank.tables, strict=True):
            end = (await table.view()).upper
            async with table.changes(as_of=self.opened_at) as feed:
                async for step in feed:
                    for change in step.changes:
                        balance = 0 if change.new is None else change.new.balance
                        changes.setdefault(change.time, {})[name, change.key] = balance
                    if end <= step.upper:
                        break
        return changes

    async def _check_as_of(self, time: int, expected: Balances) -> None:
        for name, table in zip(TABLES, self.bank.tables, strict=True):
            actual = {(name, key): account.balance async for key, account in table.items(as_of=time)}
            if actual != {place: balance for place, balance in expected.items() if place[0] == name}:
                raise CheckFailed(f"{name} as of {time} differs from its feed")

    async def _check_journal(self, first: Balances, last: Balances, transfers: int) -> None:
        async with (
            self.client.reader(self.bank.journal_name, self.bank.journal_schema) as reader,
            reader.snapshot() as snapshot,
        ):
            rows = await snapshot.rows()
        if len(rows) != transfers or any(diff != 1 for _, _, diff in rows):
            raise CheckFailed(f"the journal has {len(rows)} transfers, {transfers} were made")
        moved, counts = _sums(entry for _, entry, _ in rows)
        if {place: first[place] + moved["/".join(place)] for place in first} != last:
            raise CheckFailed("the journal does not explain the last balances")
        expected = {name: Turnover(amount=moved[name], transfers=counts[name]) for name in counts}
        if dict([entry async for entry in self.bank.turnover.items()]) != expected:
            raise CheckFailed("the turnover is not the sum of the journal")


def _sums(entries: Any) -> tuple[Counter[str], Counter[str]]:
    """The amounts that each account received minus those that it gave, and its number of transfers."""
    moved: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for entry in entries:
        assert isinstance(entry, JournalEntry)
        moved.update({entry.target: entry.amount, entry.source: -entry.amount})
        counts.update({entry.target: 1, entry.source: 1})
    return moved, counts


async def _ended(process: Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


def _environment(options: DemoOptions, directory: Path | None) -> dict[str, str]:
    """Variables with the location, for other processes: URLs may have passwords; command lines are public."""
    if directory is not None:
        return {**os.environ, "AIOPERSIST_LOCATION": str(directory.absolute())}
    stores = {"AIOPERSIST_BLOB": options.blob or "", "AIOPERSIST_CONSENSUS": options.consensus or ""}
    return {**os.environ, **stores}


async def run(options: DemoOptions, console: Console) -> None:
    """Run the demo; raises if it cannot start or a check fails."""
    for url in (options.blob, options.consensus):
        if url is not None and url.startswith("mem:"):
            raise InvalidLocation(f"{url} exists in one process only, and this demo runs several")
    transfers = options.limit or TRANSFERS
    with directory_of(options) as directory:
        async with opened(options, directory, 1) as (client,):
            with progress(console) as bars:
                demo = BankDemo(client, _environment(options, directory), bars)
                before = SYSTEM.monotonic()
                await demo.transfer_and_audit(transfers)
                seconds = max(SYSTEM.monotonic() - before, 1e-9)
                times = await demo.check(transfers)
    say(
        console,
        f"{transfers:,} transfers by {TELLERS} processes in {seconds:.1f} s: {transfers / seconds:,.0f}/s",
        f"the balances sum to {len(TABLES) * ACCOUNTS * BALANCE:,} at each of {times:,} times",
        f"the auditor was killed {demo.kills} times, and counted every transfer once",
    )
