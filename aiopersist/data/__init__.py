"""Updates as columns: types, tables of updates, and parts as Parquet. No I/O beyond bytes in memory.

On the way in `updates/convert.py` takes updates, `updates/consolidate.py` sorts and sums them, and
`part/part.py` encodes them. On the way out `part/part.py` decodes them, and `updates/updates.py` gives rows.

| package, module          | what it has                                                            |
|--------------------------|------------------------------------------------------------------------|
| `types/`                 | schemas and codecs: what a value is, as a Python value and as a column  |
| `updates/`               | tables of updates: taken in, sorted, summed, merged, given back         |
| `part/`                  | parts: Parquet with statistics, or inline                               |
| `valid`, `floats`, `refusal` | whether a value can be stored, and how it is refused                   |
| `jsonable`, `texts`      | values as JSON, as columns; as canonical texts without columns          |
| `plain`                  | columns of plain values, made without pandas                            |
| `lazy`                   | pyarrow and polars, imported when first used                            |
"""
