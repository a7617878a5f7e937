"""Goal: what it takes to open a location in a bucket and to read in it, counted."""

import aiopersist as ap
from aiopersist.storage.memory import MemoryBlob
from tests.storage.objects_kit import Place


async def test_requests_to_open_and_read(place: Place) -> None:
    """Each of five looks, at the location, the name, the shard, its versions and the newest contents,
    is two requests in turn, the second beside a third one. A client that may write tries the condition, and
    commits the lease of its reader."""
    blob, schema = MemoryBlob(""), ap.Schema(key=str, val=int)
    writes, reads = place.handle()[0], place.handle()
    async with ap.open(blob=blob, consensus=writes) as client, client.writer("t", schema) as w:
        for number in range(5):
            await w.write([("k", number)])
    consensus, calls = reads
    async with ap.open(blob=blob, consensus=consensus, readonly=True) as client:
        async with client.reader("t", schema) as r, r.snapshot() as s:
            assert len(await s.rows()) == 5
    assert calls.calls == {"list": 10, "get": 5}
    calls.calls.clear()
    async with ap.open(blob=blob, consensus=consensus, maintenance=False) as client, client.reader("t") as r:
        async with r.snapshot() as s:
            assert len(await s.rows()) == 5
            assert calls.calls == {"list": 11, "get": 5, "create": 2}
