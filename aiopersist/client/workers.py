"""`client.workers`: reads, batches and compactions that several processes share. One process plans the work;
any process carries out its pieces, which travel as bytes."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from aiopersist.base.frontier import Antichain, Time
from aiopersist.base.resource import Opening
from aiopersist.client.services import Services
from aiopersist.data.types.schema import Schema

if TYPE_CHECKING:
    from aiopersist.compact.shared_compaction import Goal, SharedCompaction
    from aiopersist.data.lazy import pa
    from aiopersist.data.updates.updates import Updates
    from aiopersist.read.puller import Items
    from aiopersist.read.shared_read import SharedRead
    from aiopersist.write.builder import BatchBuilder


class Workers:
    """The calls of one client for work that several processes share."""

    def __init__(self, services: Services) -> None:
        self._services, self._shards, self._stack = services, services.shards, services.stack

    def shared_read(
        self,
        shard: str,
        as_of: Time | datetime | None = None,
        *,
        start: int | datetime | None = None,
        end: int | datetime | None = None,
        tag: str | None = None,
        wait: bool = True,
        lease_s: float | None = None,
        keep: bool = False,
    ) -> Opening[SharedRead]:
        """A read that several processes share: the contents at `as_of` (`None`: the greatest complete time),
        or, with `start`, the changes of `[start, end)`, unmodified (`end=None`: up to the shard's upper), or
        the contents that the `tag` of that name keeps (`UnknownTag`).

        `SinceViolation` if history there is gone: changes need `since < start`, or both at the minimum. It
        waits until the range is complete, or raises `NotReadable` with `wait=False`; contents without `as_of`
        are `NotReadable` at once if nothing was appended to the shard. The lease lasts `lease_s` (default:
        `settings.reader_lease_s`) and is renewed until the read is closed; with `keep=True` it is neither
        renewed nor ended, and expires. One commit, and one more to end the lease."""

        def opening() -> Opening[SharedRead]:
            from aiopersist.read.shared_read import shared_read

            return shared_read(
                self._shards, shard, as_of, start, end, tag=tag, wait=wait, lease_s=lease_s, keep=keep
            )

        return self._services.later(
            "aiopersist.read.shared_read", opening, f"client.workers.shared_read({shard!r})"
        )

    def read_piece(self, data: bytes, where: Any = None) -> Items[pa.RecordBatch]:
        """The rows of a piece of a shared read, in any process, as Arrow batches in order: `key, val, diff`
        of contents, `key, val, time, diff` of changes, consolidated. `where` as in `Snapshot.to_arrow`. In
        memory are about `settings.read_memory_bytes`, and a row group of each run of parts as it was fetched.

        The lease is renewed if that did not happen for a quarter of it. `InvalidUpdate` for bytes that are no
        piece, `LeaseExpired` if the read was closed and a part is gone."""
        self._services.calls.check()
        from aiopersist.read.shared_read import read_piece

        return read_piece(self._shards, data, where)

    async def fetch_part(
        self, data: bytes, schema: Schema[Any, Any, Any] | None = None
    ) -> Updates[Any, Any, Any]:
        """The updates of a part that `Snapshot.parts` gave, in any process: those at times `<= as_of`, given
        that time, not consolidated across parts. By the stored schema, or one that is the same.

        `InvalidUpdate` for bytes that are no part; `LeaseExpired` if the snapshot was closed, or its lease
        lost, and the part is gone. One request for the shard's head (its whole state, if this client does not
        know it), and one for the part if it is not inline."""
        with self._services.calls.call():
            from aiopersist.read.leased import fetch_part

            return await fetch_part(self._shards, data, schema)

    async def register_writer(self, shard: str, schema: Schema[Any, Any, Any], lease_s: float) -> bytes:
        """A writer under which other processes build, as bytes, as from `WriteHandle.to_transmittable`. No
        handle keeps it: its lease lasts `lease_s` from the last heartbeat of a builder under it. A new shard
        is created; `NOT_A_TABLE` for a table. One commit, two for a new shard."""
        async with self._services.calling("aiopersist.write.remote"):
            from aiopersist.write.remote import register_writer

            return await register_writer(self._shards, shard, schema, lease_s)

    async def release_writer(self, data: bytes) -> None:
        """End the registration of that writer: batches that are staged under it can no longer be appended,
        and the sweep deletes them. One commit; none if the registration has ended."""
        async with self._services.calling("aiopersist.write.remote"):
            from aiopersist.write.remote import release_writer

            await release_writer(self._shards, data)

    def builder_from_transmittable(
        self, data: bytes, lower: Antichain | Time, schema: Schema[Any, Any, Any] | None = None
    ) -> Opening[BatchBuilder]:
        """A builder under the writer that `WriteHandle.to_transmittable` gave, whose registration it keeps
        alive. By the writer's stored schema, or one that is the same. `BatchExpired` if that writer is gone,
        or 65,536 batches of it were appended or deleted: then transmit a new writer. `InvalidUpdate` for
        bytes that are no writer. One request, and a commit if a heartbeat is due."""

        def opening() -> Opening[BatchBuilder]:
            from aiopersist.write.remote import open_builder

            return open_builder(self._shards, data, lower, schema)

        return self._services.later(
            "aiopersist.write.remote", opening, "client.workers.builder_from_transmittable(...)"
        )

    def shared_compaction(self, shard: str, goal: Goal | None = None) -> Opening[SharedCompaction]:
        """One round of a compaction of the whole shard that several processes share. Applies `retain`, waits
        while another process compacts any of the batches, and claims them. `goal`: the goal of the round
        before, to go on with it. Three commits, and one more to end it."""

        def opening() -> Opening[SharedCompaction]:
            from aiopersist.compact.shared_compaction import shared_compaction

            return shared_compaction(self._shards, shard, goal)

        return self._services.later(
            "aiopersist.compact.shared_compaction", opening, f"client.workers.shared_compaction({shard!r})"
        )

    async def compact_piece(self, data: bytes) -> bytes:
        """Carry out a piece of a shared compaction, in any process; the result is for its `apply`. In memory
        are `settings.compaction_memory_bytes`. After any error, the parts it has written are deleted.
        `InvalidUpdate` for bytes that are no piece, `LeaseExpired` if a part is gone: the claim was lost, and
        another process has replaced the part. Requests for every part that is read or written."""
        async with self._services.calling("aiopersist.compact.shared_compaction"):
            from aiopersist.compact.shared_compaction import compact_piece

            return await compact_piece(self._shards, data)
