"""Parts: sorted, consolidated updates as one Parquet file, or inline as one Arrow message.

`part` encodes and decodes, `layout` and `ranges` say how bytes lie, `stats` what a part holds without reading
it, `select` and `key_range` which rows a reader wants. Imports `data/types` and `data/updates`.
"""
