"""A consensus store in Postgres, for any number of processes on any number of hosts.

`consensus` keeps the contract; `sql` has the statements, `group` sends many compare-and-sets as one of them,
`pool` has the connections and says what errors
mean, `hints` is LISTEN and NOTIFY, `address` the URL, `tables` the schema.
"""
