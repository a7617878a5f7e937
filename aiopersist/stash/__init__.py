"""Small metadata in transactions: named collections of `(key, val, time, diff)`, read whole.

    async with ap.stash.open("sqlite:///app.db") as stash:
        settings = TypedCollection("settings", str, str)
        await settings.upsert_key(stash, "theme", "dark")

`client.stash()` opens the stash in a location's own consensus database.

| module       | what it has                                                                |
|--------------|----------------------------------------------------------------------------|
| `model`      | the values: frontiers, rows of text, changes, verdicts; pure               |
| `rules`      | what each call may do to a collection; pure                                |
| `rows`       | from entries to rows of text, and back                                     |
| `store`      | the contract of a backend                                                  |
| `memory`, `sqlite`, `postgres` | the backends                                             |
| `sqlite_sql`, `sqlite_checks`, `postgres_sql` | statements, and checks of answers         |
| `session`    | the one loop that writes, and finds out the outcome                        |
| `collection` | the user's handle of a collection, and a batch for it                      |
| `stash`      | the calls                                                                  |
| `typed`, `table`, `transact`, `migrate` | on top of the calls                             |
| `open`       | URLs and modes                                                             |
| `errors`     | the refusals                                                               |

Imports `storage`, `data`, `measure`.
"""

from aiopersist.stash.collection import AppendBatch, StashCollection
from aiopersist.stash.errors import NothingSealed, StaleLower, StashError
from aiopersist.stash.open import open  # noqa: A004  # `ap.stash.open`
from aiopersist.stash.stash import MemoryStash, PostgresStash, SqliteStash, Stash
from aiopersist.stash.table import TableTransaction
from aiopersist.stash.transact import transact
from aiopersist.stash.typed import TypedCollection

__all__ = [
    "AppendBatch",
    "MemoryStash",
    "NothingSealed",
    "PostgresStash",
    "SqliteStash",
    "StaleLower",
    "Stash",
    "StashCollection",
    "StashError",
    "TableTransaction",
    "TypedCollection",
    "open",
    "transact",
]
