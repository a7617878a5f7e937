"""The types of a shard's keys and vals: a `schema` of fields, each a `codec` between Python and Arrow.

`annotations` reads Python types, `objects` has `UUID` and enums, `nested` lists and structs; `cast` takes
Arrow columns from outside, `evolve` decides which schema may follow another. Imports no other package of
`data`.
"""
