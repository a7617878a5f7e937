"""Parts: updates as bytes in the blob store, written and read in bounded memory.

On the way in, `upload` checks, sorts, cuts and encodes updates and puts them into the blob store; what comes
of it is a *hollow* batch, which names the bytes, for a commit of `shard/`. On the way out, `fetch` turns
hollow parts into updates again, and `runs` merges many sorted runs of them.

| module                       | what it has                                                        |
|------------------------------|--------------------------------------------------------------------|
| `upload`, `put`, `columns`   | from updates to hollow parts                                       |
| `sorted_parts`               | the same, of updates that come sorted                              |
| `flush`                      | inline parts that become blobs                                     |
| `copies`                     | parts written again, under another writer                          |
| `fetch`                      | from hollow parts to updates                                       |
| `runs`, `rewrite`            | sorted runs merged; written as one                                 |
| `divide`, `envelope`         | work shared out as values that travel between processes            |

Imports `shard` and `data`. Garbage collection (`gc/`) imports nothing from here: it never looks into a blob.
"""
