"""Consensus on an object store alone: `consensus` keeps the contract, on the few operations of `bucket`.

`reads` and `bulk` read one key and many, `wishes` has the wishes. `names` and `tails` describe the objects,
`heads` and `recent` remember them. `served`, `clock` and `answers` have what the servers have in common.
"""
