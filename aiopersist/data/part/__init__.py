"""Parts: sorted, consolidated updates as one Parquet file, or inline as one Arrow message.

`part` encodes and decodes blobs, `inline` inline parts, `message` those of a few rows; `unnamed` reads parts
that no state names. `layout` and `ranges` describe how the bytes lie, `stats` what a part holds. `select`,
`where_text`, `keys`, `wanted_keys` and `key_range` describe the rows that a reader wants; `flat` and
`prefilter` the columns and the conditions of other engines. Imports `data/types` and `data/updates`.
"""
