"""What the keys and vals of a shard are: a `schema` of fields, each a `codec` between Python and Arrow.

`annotations` reads Python types, `nested` has lists and structs, `cast` takes Arrow columns of others,
`evolve` says which schema may follow which. Imports no other package of `data`.
"""
