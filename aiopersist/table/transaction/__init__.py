"""Transactions over tables. `transact` runs attempts of a body, `transaction` is the argument of the body,
`consistent_read` brings views to one moment, `snapshot_transaction` reads while others write all the time."""
