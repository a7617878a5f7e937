"""A consensus store in one SQLite file, for the processes of one host.

`consensus` keeps the contract; `file` says why a commit is durable, and runs jobs in the threads of `worker`;
`connection` says when a file is no longer the one that was opened, `forks` what a child of a fork must not
open, and `rights` who may; `sql` has the statements; `hints` tells other processes which keys moved.
`readonly` opens the file for a client that may not write it; `reads` has the reads that both share.
"""
