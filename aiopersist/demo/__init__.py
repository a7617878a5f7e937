"""`aiopersist demo`: writes the history of a git repository, reads it back, and compares it with git.

`git` reads the repository; `history` uses shards, `indexed` an `Indexed`, `spark` Spark jobs; `common` has
shared code. `tables` runs a bank instead: `bank` has the transactions, `bank_process` its processes.
"""
