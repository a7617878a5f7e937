"""The two stores of a location: `Blob` keeps whole values, `Consensus` a log of versions per key.

| module                            | what it has                                                          |
|-----------------------------------|----------------------------------------------------------------------|
| `blob`, `consensus`               | the contracts; a new store implements one of them                    |
| `s3/`, `clouds/`                  | objects in S3; in Azure and Google Cloud Storage                     |
| `objects/`                        | consensus on the objects of either                                   |
| `files/`                          | a blob store                                                         |
| `postgres/`, `sqlite/`            | consensus stores, each with its SQL and its hints beside it          |
| `memory`                          | both, short enough to serve as the specification                     |
| `layers`, `cache`, `readonly`     | wrappers of every store: cache, retry, metrics; refusal of writes    |
| `disk_cache`                      | blobs on local disk, before a store on a server                      |
| `wrapper`                         | the base class of these wrappers                                     |
| `urls`, `address`, `keys`         | which URL opens which store; which keys are legal                    |
| `identity`                        | the check that two stores belong to one location                     |
| `watch`, `waiters`                | many keys in one wait for hints; the waiting tasks of this process   |
| `wishes`                          | which clients wish to commit first, as far as a handle knows        |
| `folders`, `stall`                | folders that survive a power failure; a log line for a long wait     |

A *hint* says that a key may have moved; only a read is reliable. Each store maps the errors of its driver to
those of the library, in its own folder.

Imports `measure`.
"""
