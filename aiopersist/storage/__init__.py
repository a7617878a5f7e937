"""The two stores of a location: `Blob` keeps whole values, `Consensus` a log of versions per key.

| module                            | what it has                                                   |
|-----------------------------------|---------------------------------------------------------------|
| `blob`, `consensus`               | the contracts; a new store implements one of them             |
| `s3/`, `files/`                   | blob stores                                                   |
| `postgres/`, `sqlite/`            | consensus stores, each with its SQL beside it                 |
| `memory`                          | both, as a specification one can read                         |
| `layers`, `cache`, `patience`     | what every store is wrapped in: cache, retry, metrics         |
| `readonly`                        | what a readonly client is given instead                       |
| `urls`, `address`, `keys`         | which URL opens which store; what keys may be                 |
| `identity`                        | that two stores belong to one location                        |
| `watch`, `watchers`, `hints`      | who waits for a key to move, and how it is told               |
| `lane`, `folders`                 | one thread that works in order; folders that survive a power failure |

Foreign errors become ours in the store's folder and nowhere else. Imports `errors`, `settings`, `runtime`.
"""
