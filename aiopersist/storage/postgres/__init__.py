"""A consensus store in Postgres, for any number of processes on any number of hosts.

`consensus` keeps the contract and argues why; `sql` has the statements, `tables` creates the schema; `group`
sends many compare-and-sets as one statement; `connect` makes connections, `pool` keeps them and says what
errors mean; `hints` is LISTEN and NOTIFY; `address` parses the URL.
"""
