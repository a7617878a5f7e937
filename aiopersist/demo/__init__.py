"""`aiopersist demo`: the history of a git repository, written, read back and compared.

`git` reads the repository; `history` uses shards, `indexed` an `Indexed`, `spark` Spark jobs. What they print
is checked against `git` itself.
"""
