"""Many named streams, sealed together. So far their pure core: the arrangement of one stream's batches.

| module        | what it has                                                             |
|---------------|-------------------------------------------------------------------------|
| `model`       | the values: batches of unsealed updates, of the trace; an arrangement   |
| `arrangement` | every transition of an arrangement, as plans and changes; pure          |
| `invariants`  | what holds of every arrangement                                         |
"""
