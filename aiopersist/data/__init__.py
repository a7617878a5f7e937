"""Updates as columns: types, tables of updates, and parts as Parquet. No I/O beyond bytes in memory.

On the way in: `updates/convert.py` takes updates, `updates/consolidate.py` sorts and sums them,
`part/part.py` makes them bytes. They go back through `part/part.py` and `updates/updates.py`.

| package, module          | what it has                                                            |
|--------------------------|------------------------------------------------------------------------|
| `types/`                 | schemas and codecs: what a value is, as a Python value and as a column  |
| `updates/`               | tables of updates: taken in, sorted, summed, merged, given back         |
| `part/`                  | parts: Parquet with statistics, or inline                               |
| `valid`, `floats`, `refusal` | what is no value, and how it is refused                             |
| `jsonable`, `int64`      | single values as JSON; integers without pandas                          |
| `lazy`                   | pyarrow and polars, imported when first used                            |

Imports `errors`, `frontier`, `settings`.
"""
