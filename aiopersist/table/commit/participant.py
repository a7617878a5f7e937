"""The shards that a group commit writes: tables, shards with a wall clock that transactions append to, and
internal shards that remember the ids of transactions."""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.base.frontier import Antichain
from aiopersist.data.types.evolve import mismatch
from aiopersist.data.updates.assemble import at_time, concat
from aiopersist.data.updates.tiny import Tiny
from aiopersist.shard.register import Register
from aiopersist.shard.shard import Shard
from aiopersist.state.model import State
from aiopersist.table.view.contents import FullView
from aiopersist.table.view.view import View
from aiopersist.write.session import Session

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs


class ShardWrites(Struct, eq=False):
    """The writes of one commit to one shard."""

    changes: Mapping[str, str | None] = {}
    """The net changes by key."""
    old: Mapping[str, str | None] = {}
    """The values that they replace."""
    rows: "list[pa.Table]" = []
    size: int = 0
    """The bytes of all that, an estimate."""


class EmptyView:
    """In place of a view, for a shard without keys: no key has a value."""

    contents = FullView()
    is_resident = True
    tidying = None
    version = 0

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    @property
    def upper(self) -> Antichain:
        """The upper of the newest state that this process knows."""
        return self._shard.state.upper

    async def catch_up(self) -> None:
        """The upper follows by itself."""


class Participant:
    """One shard of a group commit."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.register: Register = shard.register
        """Its newest state, and the races for the next one."""
        self.view: View | EmptyView = EmptyView(shard)

    @property
    def state(self) -> State:
        """The newest state that this process knows."""
        return self.shard.state

    async def look(self) -> None:
        """Read the head. One request, shared with others that wait."""
        await self.shard.open()

    def check_schema(self) -> None:
        """`CodecMismatch` if values may have fields that the writer does not know: its retractions would miss
        them."""


class RecordParticipant(Participant):
    """An internal shard that remembers ids of transactions. It has no data, and its upper stays."""


class WrittenParticipant(Participant):
    """A shard that is appended to."""

    def __init__(self, writer: Session) -> None:
        super().__init__(writer.shard)
        self.writer = writer

    @abstractmethod
    def updates(self, writes: ShardWrites, time: int) -> "pa.Table | Tiny":
        """The updates of a commit at `time`. There are some."""


class TableParticipant(WrittenParticipant):
    """A table."""

    view: View

    def __init__(self, view: View, writer: Session) -> None:
        super().__init__(writer)
        self.view = view

    def check_schema(self) -> None:
        if self.writer.context.schema_id != self.state.schema_id:
            stored = self.shard.schema(self.state.schema_id)
            raise mismatch(stored, self.writer.schema, shard_id=self.shard.id)

    def updates(self, writes: ShardWrites, time: int) -> "pa.Table | Tiny":
        schema, changes, old = self.view.table_schema, writes.changes, writes.old
        return schema.few_updates(changes, old, time) or schema.updates(changes, old, time)


class ShardParticipant(WrittenParticipant):
    """A shard to which rows are appended, also of an older schema. Two are equal if they have the same shard
    and the same schema of rows, whichever writers they use: a commit has one version of a shard."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardParticipant) or self.shard is not other.shard:
            return False
        return self.writer.context.schema_id == other.writer.context.schema_id

    def __hash__(self) -> int:
        return hash(self.shard.id)

    def updates(self, writes: ShardWrites, time: int) -> "pa.Table":
        return at_time(concat(writes.rows, self.writer.schema), time, self.writer.schema)


def check_distinct(participants: Collection[Participant]) -> None:
    """`InvalidUsage` if two views of one table take part: a commit has one version of a shard."""
    shards: set[Shard] = set()
    for participant in participants:
        shard = participant.shard
        if shard in shards:
            text = f"{shard.label} takes part twice: by its name and its id, or with two types"
            raise InvalidUsage(UsageKind.INVALID_APPEND, text, shard_id=shard.id)
        shards.add(shard)
