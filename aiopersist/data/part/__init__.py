"""Parts: sorted, consolidated updates as one Parquet file, or inline as one Arrow message.

`part` encodes and decodes blobs, `inline` inline parts. `layout` and `ranges` describe how the bytes lie,
`stats` what a part holds; `select`, `keys` and `key_range` describe the rows that a reader wants. Imports
`data/types` and `data/updates`.
"""
