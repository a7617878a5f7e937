"""Tables of updates `(key, val, time, diff)`: to columns, sorted, summed, cut, merged, and back to rows.

| module                                  | what it has                                            |
|-----------------------------------------|--------------------------------------------------------|
| `convert`, `inputs`, `tiny`             | columns of the updates that users pass                 |
| `order`, `codes`                        | the order of rows, as tuples and as numbers            |
| `consolidate`, `many`, `merge`          | sorting, summing, merging                              |
| `times`                                 | comparison of times with frontiers; advancing them     |
| `sizes`, `slices`, `buffer`, `assemble` | measuring, cutting, gathering and joining tables       |
| `updates`                               | columns that read as rows                              |

Imports `data/types`.
"""
