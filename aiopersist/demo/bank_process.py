"""A process of `aiopersist demo --tables`: a teller, whose tasks make transfers, or the auditor.

`aiopersist.demo.tables` starts these processes and kills the auditor. The environment names the location.
"""

import asyncio
import sys
from collections.abc import Iterator

from aiopersist.client.open import open as open_client
from aiopersist.demo.bank import Bank, JournalEntry
from aiopersist.write.handle import WriteHandle

TASKS = 16  # of a teller


async def teller(bank: Bank, name: str, transfers: int) -> None:
    """Make transfers, and write the name of each durable one to standard output."""
    journal = await bank.journal()
    ids = (f"{name}-{number}" for number in range(transfers))
    async with journal, asyncio.TaskGroup() as tasks:
        for _ in range(TASKS):
            tasks.create_task(_transfer(bank, journal, ids))


async def _transfer(bank: Bank, journal: WriteHandle[str, JournalEntry], ids: Iterator[str]) -> None:
    for id_ in ids:
        await bank.transfer(journal, id_)
        sys.stdout.write(f"{id_}\n")
        sys.stdout.flush()


async def main(role: str, run: str, name: str, transfers: int) -> None:
    """The process."""
    async with open_client() as client:
        bank = Bank(client, run)
        await (teller(bank, f"{run}-{name}", transfers) if role == "teller" else bank.audit())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
