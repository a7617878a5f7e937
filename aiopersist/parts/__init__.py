"""Parts: updates as bytes in the blob store, written and read in bounded memory.

A write uses `upload`, which checks, sorts, cuts and encodes updates and puts them into the blob store. The
result is a *hollow* batch, which names the bytes; `shard/` commits it. A read uses `fetch`, which turns
hollow parts into updates, and `runs`, which merges many sorted runs of parts.

| module                       | what it has                                                        |
|------------------------------|--------------------------------------------------------------------|
| `upload`, `columns`          | from updates to hollow parts                                       |
| `sorted_parts`               | the same for sorted updates                                        |
| `put`                        | writing blobs; deleting them if no state names them                |
| `flush`                      | inline parts that become blobs                                     |
| `copies`                     | copies of parts under another writer                               |
| `fetch`                      | from hollow parts to updates                                       |
| `named_parts`                | the parts of an `Indexed`, in the form that `fetch` takes          |
| `runs`, `rewrite`            | merging sorted runs; writing them as one run                       |
| `divide`, `envelope`         | dividing work into pieces, which travel between processes          |

Imports `shard`, `state`, `storage`, `data`, `measure`. Garbage collection (`gc/`) imports nothing from here:
it reads no parts.
"""
