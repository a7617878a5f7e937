"""Many named streams that are sealed together. Updates come in any order, at any times that are not sealed.

    async with client.indexed("orders") as ix:
        placed = await ix.register("placed", str, int)
        await ix.write([(placed, [("a", 1, 12, 1)])])
        await ix.seal([placed], 13)

| module                       | what it has                                                            |
|------------------------------|------------------------------------------------------------------------|
| `indexed`, `open`            | the public calls, and the opening                                      |
| `core`, `errors`             | the state that all modules share; the errors                           |
| `committer`                  | the queue of commands, and group commit                                |
| `draft`                      | applies a group of commands to the streams, in order; pure             |
| `commands`                   | the transitions of the versioned state: take over, change, leave; pure |
| `arrangement`                | the transitions of one stream's batches, as plans and changes; pure    |
| `raw`, `work`                | write batches, and carry out the plans                                 |
| `maintenance`, `background`  | steps and compactions; the task that runs them                         |
| `snapshot`, `listen`, `view` | reads                                                                  |

Imports `maintenance`, `read`, `parts`, `shard`, `state`, `data`.
"""

from aiopersist.indexed.core import Stream
from aiopersist.indexed.errors import Fenced, IndexedError, Refused, Stopped, UnknownStream
from aiopersist.indexed.indexed import Indexed
from aiopersist.indexed.listen import Listener, Listening, Records, Sealed
from aiopersist.indexed.maintenance import CompactionRequest, CompactionResponse
from aiopersist.indexed.snapshot import StreamSnapshot
from aiopersist.indexed.view import StreamView

__all__ = [
    "CompactionRequest",
    "CompactionResponse",
    "Fenced",
    "Indexed",
    "IndexedError",
    "Listener",
    "Listening",
    "Records",
    "Refused",
    "Sealed",
    "Stopped",
    "Stream",
    "StreamSnapshot",
    "StreamView",
    "UnknownStream",
]
