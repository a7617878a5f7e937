"""`aiopersist demo`: writes the history of a git repository, reads it back, and compares it with git itself.

`git` reads the repository; `history` uses shards, `indexed` an `Indexed`, `spark` Spark jobs; `common` is
what they share. `tables` is a bank instead: `bank` says what its processes (`bank_process`) do.
"""
