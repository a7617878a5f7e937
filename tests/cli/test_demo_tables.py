"""The demo of tables runs as a command, and can tell when it should fail."""

import re
from pathlib import Path

import pytest

import aiopersist as ap
from aiopersist.demo.bank import Bank, BankAccount, JournalEntry
from aiopersist.demo.common import CheckFailed
from aiopersist.demo.tables import BankDemo
from tests.cli.test_demo import demo
from tests.support.location import of_kinds


@pytest.mark.slow
def test_transfers_are_made_audited_and_checked(tmp_path: Path) -> None:
    result = demo("--tables", "--limit", 60, "--location", tmp_path / "kept", cwd=tmp_path)
    assert (result.status, result.err) == (0, "")
    assert "60 transfers by 3 processes" in result.out
    assert re.search(r"the balances sum to 200,000 at each of [\d,]+ times", result.out)
    assert re.search(r"the auditor was killed \d times, and counted every transfer once", result.out)


@of_kinds("mem")
@pytest.mark.several_shards
@pytest.mark.slow
def test_on_every_location(location: tuple[str, str], tmp_path: Path) -> None:
    blob, consensus = location
    result = demo("--tables", "--limit", 20, "--blob", blob, "--consensus", consensus, cwd=tmp_path)
    if blob.startswith("mem:"):
        assert (result.status, result.out) == (2, "")
        assert "exists in one process only" in result.err
    else:
        assert (result.status, result.err) == (0, "")


def test_one_demo_at_a_time(tmp_path: Path) -> None:
    result = demo("--tables", "--indexed", cwd=tmp_path)
    assert (result.status, result.out) == (2, "")
    assert "choose one" in result.err


class Silent:
    """Bars that show nothing."""

    def add_task(self, name: str, total: int) -> int:
        return 0

    def advance(self, bar: int) -> None:
        """Nothing."""


async def checked(client: ap.Client, spoil: str | None) -> int:
    """A bank with two transfers, one of them spoiled in some way, after its check."""
    demo = BankDemo(client, {}, Silent())  # type: ignore[arg-type]
    bank = demo.bank
    demo.opened_at = await bank.open_accounts()
    async with await bank.journal() as journal:
        for name in ("a", "b"):
            await bank.transfer(journal, name)
        if spoil == "balance":
            await bank.tables[0].put("000", BankAccount(balance=5))
        if spoil == "journal":
            await journal.write([("c", JournalEntry(source="checking/000", target="savings/000", amount=1))])
        async with (
            client.reader(bank.journal_name, bank.journal_schema) as reader,
            reader.snapshot() as snapshot,
        ):
            rows = [(entry, diff) for _, entry, diff in await snapshot.rows()]
        await _book(client, bank, rows[:1] if spoil == "turnover" else rows)
    return await demo.check(3 if spoil == "count" else 2)


async def _book(client: ap.Client, bank: Bank, rows: list[tuple[JournalEntry, int]]) -> None:
    async def add(tx: ap.Transaction) -> None:
        await bank.book(tx, rows)

    await client.transact(add)


async def test_the_check_passes() -> None:
    async with ap.open("mem://") as client:
        assert await checked(client, None) == 3


@pytest.mark.parametrize("spoil", ["balance", "journal", "turnover", "count"])
async def test_the_check_can_fail(spoil: str) -> None:
    async with ap.open("mem://") as client:
        with pytest.raises(CheckFailed):
            await checked(client, spoil)
