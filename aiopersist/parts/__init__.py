"""Parts: updates as bytes in the blob store, written and read in bounded memory.

On the way in, `upload` checks, sorts, cuts and encodes updates and puts them into the blob store. The result
is a *hollow* batch, which names the bytes; `shard/` commits it. On the way out, `fetch` turns hollow parts
into updates again, and `runs` merges many sorted runs of parts.

| module                       | what it has                                                        |
|------------------------------|--------------------------------------------------------------------|
| `upload`, `columns`          | from updates to hollow parts                                       |
| `sorted_parts`               | the same for updates that are already sorted                       |
| `put`                        | blobs written, and deleted if no state names them                  |
| `flush`                      | inline parts that become blobs                                     |
| `copies`                     | parts written again under another writer                           |
| `fetch`                      | from hollow parts to updates                                       |
| `named_parts`                | the parts of the streams of an `Indexed`, as `fetch` takes them    |
| `runs`, `rewrite`            | sorted runs merged; written as one run                             |
| `divide`, `envelope`         | work divided into pieces, which travel between processes           |

Imports `shard`, `state`, `storage`, `data`, `measure`. Garbage collection (`gc/`) imports nothing from here:
it never looks into a blob.
"""
