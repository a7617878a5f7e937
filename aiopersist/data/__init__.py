"""Updates as columns: types, tables of updates, and parts as Parquet. No I/O beyond bytes in memory.

A write uses `updates/convert.py` (rows to columns), `updates/consolidate.py` (sort and sum) and
`part/part.py` (encode). A read uses `part/part.py` (decode) and `updates/updates.py` (columns to rows).

| package, module              | what it has                                                     |
|------------------------------|-----------------------------------------------------------------|
| `types/`                     | schemas and codecs: a value in Python, and in a column          |
| `updates/`                   | tables of updates: converted, sorted, summed, merged            |
| `part/`                      | parts: Parquet with statistics, or inline                       |
| `valid`, `floats`, `refusal` | checks of values, and the error of a value                      |
| `jsonable`, `texts`          | values as JSON: by columns, and without columns                 |
| `arrays`                     | Arrow columns of Python values, made without importing pandas   |
| `lazy`                       | pyarrow and polars, imported at the first use                   |
"""
