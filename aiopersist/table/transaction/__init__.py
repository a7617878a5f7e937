"""Transactions over tables: `transact` runs attempts of a body, `transaction` is what the body is given,
`consistent_read` shows all views at one moment, `frozen` reads beside writers that never pause."""
