"""The shards that a group commit writes: tables, and plain shards with a wall clock that transactions append
to."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from aiopersist.data.types.evolve import mismatch
from aiopersist.data.updates.assemble import at_time, concat
from aiopersist.frontier import Antichain
from aiopersist.state.model import State
from aiopersist.table.view import View
from aiopersist.write.session import Session

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs

NOTHING: Mapping[str, str] = {}


class Member(ABC):
    """One shard, as the group commit sees it."""

    def __init__(self, writer: Session) -> None:
        self.writer = writer

    @property
    def state(self) -> State:
        """The newest state that this process knows."""
        return self.writer.shard.state

    async def look(self) -> None:
        """Read its head. One request, shared with others that wait."""
        await self.writer.shard.open()

    def check_schema(self) -> None:
        """`CodecMismatch` if vals may have fields by now that this writer does not know: it would retract
        what is not there."""
        shard = self.writer.shard
        if self.writer.context.schema_id != self.state.schema_id:
            raise mismatch(shard.schema(self.state.schema_id), self.writer.schema, shard_id=shard.id)

    @property
    @abstractmethod
    def upper(self) -> Antichain:
        """The frontier at which it is planned."""

    @property
    @abstractmethod
    def vals(self) -> Mapping[str, str]:
        """The vals by key before `upper`, as texts."""

    @abstractmethod
    async def catch_up(self) -> None:
        """Move `upper` to that of the newest state that this process knows."""

    @abstractmethod
    def updates(self, changes: Mapping[str, str | None], rows: Sequence["pa.Table"], time: int) -> "pa.Table":
        """The updates of a commit at `time`: net changes by key, and rows."""

    @abstractmethod
    def committed(self, lower: Antichain, upper: Antichain, changes: Mapping[str, str | None]) -> None:
        """A commit of this process replaced `lower` by `upper`."""


class TableMember(Member):
    """A table."""

    def __init__(self, view: View, writer: Session) -> None:
        super().__init__(writer)
        self.view = view

    @property
    def upper(self) -> Antichain:
        return self.view.upper

    @property
    def vals(self) -> Mapping[str, str]:
        return self.view.vals

    async def catch_up(self) -> None:
        await self.view.catch_up()

    def updates(self, changes: Mapping[str, str | None], rows: Sequence["pa.Table"], time: int) -> "pa.Table":
        old = {key: self.view.vals.get(key) for key in changes}
        return self.view.kind.updates(changes, old, time)

    def committed(self, lower: Antichain, upper: Antichain, changes: Mapping[str, str | None]) -> None:
        self.view.committed(lower, upper, changes)


class PlainMember(Member):
    """A shard without keys: rows are appended to it. Two are equal if their shard is the same: it has one
    version in a commit, whichever of its writers is used."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PlainMember) and self.writer.shard is other.writer.shard

    def __hash__(self) -> int:
        return hash(self.writer.shard.id)

    @property
    def upper(self) -> Antichain:
        return self.state.upper

    @property
    def vals(self) -> Mapping[str, str]:
        return NOTHING

    def check_schema(self) -> None:
        """Rows of an older schema may be appended."""

    async def catch_up(self) -> None:
        """Its state is all that is needed."""

    def updates(self, changes: Mapping[str, str | None], rows: Sequence["pa.Table"], time: int) -> "pa.Table":
        return at_time(concat(rows, self.writer.schema), time, self.writer.schema)

    def committed(self, lower: Antichain, upper: Antichain, changes: Mapping[str, str | None]) -> None:
        """The state says so."""
