"""Tables of updates `(key, val, time, diff)`: taken in, sorted, summed, cut, merged and given back.

| module                            | what it has                                            |
|-----------------------------------|--------------------------------------------------------|
| `convert`, `given`, `tiny`        | from the updates that users give to columns            |
| `order`, `codes`                  | the order of rows, as tuples and as numbers            |
| `consolidate`, `many`, `merge`    | sorted, summed, merged                                 |
| `times`                           | which rows a frontier holds; times advanced            |
| `sizes`, `slices`, `buffer`, `assemble` | cut, gathered, put together                      |
| `updates`                         | columns that read as rows                              |

Imports `data/types`.
"""
