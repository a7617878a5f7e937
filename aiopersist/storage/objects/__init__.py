"""Consensus on an object store alone: `consensus` keeps the contract, on the few operations of `bucket`."""
