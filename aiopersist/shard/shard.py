"""A shard in one client: its register, its schemas, and the reader that all handles share."""

from typing import Any, TypeVar

from aiopersist.base.errors import ShardFinalized, UnknownShard
from aiopersist.base.frontier import Antichain, Time, minimum, shaped
from aiopersist.data.lazy import pa
from aiopersist.data.types.evolve import mismatch
from aiopersist.data.types.schema import Schema
from aiopersist.shard.catalog import ShardId, find
from aiopersist.shard.commit import commit
from aiopersist.shard.hold import ReadonlyHold, SharedHold
from aiopersist.shard.register import Register
from aiopersist.shard.stack import Stack
from aiopersist.state.command import live
from aiopersist.state.model import Clock, State

K = TypeVar("K")
V = TypeVar("V")


class Shard:
    """See the header. One per client and shard, kept alive by its handles."""

    def __init__(self, stack: Stack, shard_id: ShardId, name: str | None = None) -> None:
        self.id = shard_id
        self.name = name
        """The name by which it was opened last; `None` if by its id."""
        self.stack = stack
        self.register = Register(stack, shard_id)
        self.register.label_of = lambda: self.label
        self.hold: SharedHold = (ReadonlyHold if stack.readonly else SharedHold)(stack, self.register)
        self._schemas: dict[int, Schema[Any, Any, Any]] = {}
        self._columns: dict[int, pa.Schema] = {}

    @property
    def label(self) -> str:
        """Its label in errors and logs, with its name or id."""
        return f"{self.id.kind} {self.id if self.name is None else repr(self.name)}"

    @property
    def known_as(self) -> str:
        """The name by which it was opened, else its id."""
        return str(self.id) if self.name is None else self.name

    @property
    def state(self) -> State:
        """The newest state that this process knows."""
        state = self.register.state
        assert state is not None, "opened before use"
        return state

    async def open(self) -> State:
        """Read its newest state: `UnknownShard`, `ShardFinalized`. A read of the head, of the rollup and of
        the diffs since then, if this client has not read it yet; else one request."""
        state = await self.register.refresh()
        if state is None:
            raise UnknownShard(f"there is no {self.label}", shard_id=self.id)
        if state.finalized:
            raise ShardFinalized(f"{self.label} is finalized", shard_id=self.id)
        return state

    async def open_or_create(
        self, schema: Schema[Any, Any, Any], clock: Clock = Clock.LOGICAL, *, table: bool = False
    ) -> State:
        """Open the shard, or create it by one more commit, with that clock, perhaps as a table. After a
        creation the name is read again: if it was dropped meanwhile, the new shard, which no user has seen,
        is finalized."""
        if await self.register.refresh() is None:
            await self.stack.imported("aiopersist.state.lifecycle")
            from aiopersist.state.lifecycle import Create, Finalize

            command = Create(self.id, schema.to_record(), minimum(schema.time_length), clock, table)
            await commit(self.register, command)
            if self.name is not None and await find(self.stack, self.name, type(self.id)) != self.id:
                await commit(self.register, Finalize(self.id))
        return await self.open()

    async def settle_senders(self) -> None:
        """Wait until no append of this client to the shard is under way, and all outcomes are known."""
        for idle in [idle for idle, shard in self.stack.senders.items() if shard == self.id]:
            await idle()

    def schema(self, schema_id: int) -> Schema[Any, Any, Any]:
        """The stored schema of that id, in Arrow types. `ShardFinalized` if the shard was finalized, and the
        schema was not read before."""
        if schema_id not in self._schemas:
            live(self.state)
            self._schemas[schema_id] = Schema.from_record(self.state.schemas[schema_id])
        return self._schemas[schema_id]

    def columns(self, schema_id: int) -> "pa.Schema":
        """The columns of the stored schema of that id, with the field ids of its parts. A stream of an
        `Indexed` has one schema; the other schemas of the shard are those of other streams."""
        if schema_id not in self._columns:
            from aiopersist.data.types.field_ids import with_field_ids  # imported late: reads do without

            ids = sorted(n for n in self.state.schemas if n <= schema_id)
            earlier = ids if self.state.streams is None else [schema_id]
            self._columns[schema_id] = with_field_ids([self.schema(n).arrow_schema for n in earlier])
        return self._columns[schema_id]

    def as_stored(self, schema: Schema[K, V, Any]) -> Schema[K, V, Any]:
        """`schema` in the shard's encoding of texts and bytes; `CodecMismatch` if it has another."""
        schemas = [self.schema(schema_id) for schema_id in sorted(self.state.schemas, reverse=True)]
        if any(stored.same_as(schema) for stored in schemas):
            return schema
        from aiopersist.data.types.encodings import encoded_as  # imported late: few shards need it

        for stored in schemas:
            if stored.same_as(encoded := encoded_as(schema, stored)):
                return encoded
        raise mismatch(self.schema(self.state.schema_id), schema, shard_id=self.id)

    def schema_id(self, schema: Schema[Any, Any, Any]) -> int:
        """The id of `schema` in the shard; `CodecMismatch` if the shard does not have it."""
        for schema_id in sorted(self.state.schemas, reverse=True):
            if self.schema(schema_id).same_as(schema):
                return schema_id
        raise mismatch(self.schema(self.state.schema_id), schema, shard_id=self.id)

    def checked_frontier(self, value: Antichain | Time) -> Antichain:
        """`value` as a frontier of the shard's times; `INVALID_TIME` for another shape."""
        return shaped(value, self.schema(self.state.schema_id).time_length)
