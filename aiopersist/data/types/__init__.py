"""The types of a shard's keys and vals: a `schema` of fields, each a `codec` between Python and Arrow.

`annotations` reads Python types, `objects` has `UUID` and enums, `nested` lists and structs. `cast` takes
Arrow columns from outside, `encodings` has the encodings of one type, `evolve` decides which schema may
follow another. `field_ids` numbers the fields of a shard for readers of Parquet. `exact_keys` and `readable`
check that keys, times and durations of tables come back as they were. Imports no other package of `data`.
"""
