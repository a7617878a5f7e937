"""A consensus store in one SQLite file, for the processes of one host.

`consensus` keeps the contract, `file` says why a commit is durable, `sql` has the statements, `reads` what is
read by whoever opened the file, `readonly` the file of one who may not write it.
"""
