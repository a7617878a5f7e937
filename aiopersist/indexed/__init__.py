"""Many named streams, sealed together: updates come at any time not yet sealed, in any order.

    async with client.indexed("orders") as ix:
        placed = await ix.register("placed", str, int)
        await ix.write([(placed, [("a", 1, 12, 1)])])
        await ix.seal([placed], 13)

| module        | what it has                                                             |
|---------------|-------------------------------------------------------------------------|
| `arrangement` | every transition of one stream's batches, as plans and changes; pure    |
| `draft`       | what commands make of the streams, one after the other; pure            |
| `commands`    | how the streams become others in the versioned state; pure              |
| `committer`   | the queue of commands, and group commit                                 |
| `raw`, `work` | reading and writing batches                                             |
| `maintenance`      | a step, and compactions; `background` does them now and then            |
| `snapshot`, `listen`, `view` | what is read                                             |
| `core`        | what all of these share                                                 |
| `indexed`     | the calls; `open` opens it                                              |
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
