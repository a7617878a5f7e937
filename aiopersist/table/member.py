"""The shards that a group commit writes: tables, and plain shards with a wall clock that transactions append
to."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiopersist.data.types.evolve import mismatch
from aiopersist.data.updates.assemble import at_time, concat
from aiopersist.frontier import Antichain
from aiopersist.state.model import State
from aiopersist.table.view import View
from aiopersist.write.session import Session

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs


@dataclass(slots=True)
class Made:
    """What a commit makes of one shard."""

    changes: Mapping[str, str | None] = field(default_factory=dict)
    """The net changes by key."""
    old: Mapping[str, str | None] = field(default_factory=dict)
    """The vals that they replace."""
    rows: "list[pa.Table]" = field(default_factory=list)


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

    def unknown(self, keys: Iterable[str]) -> list[str]:
        """Those keys whose vals must be looked up before `val_of`."""
        return []

    def keeping(self, keys: Collection[str]) -> AbstractContextManager[None]:
        """Within it these keys stay known, once they are."""
        return nullcontext()

    async def know(self, keys: Collection[str]) -> None:
        """Look up the unknown ones of keys that are kept."""
        assert not self.unknown(keys)

    @property
    @abstractmethod
    def val_of(self) -> Callable[[str], str | None]:
        """Gives the val of a known key before `upper`, as text."""

    @abstractmethod
    async def catch_up(self) -> None:
        """Move `upper` to that of the newest state that this process knows."""

    @abstractmethod
    def updates(self, made: "Made", time: int) -> "pa.Table":
        """The updates of a commit at `time`."""

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

    def unknown(self, keys: Iterable[str]) -> list[str]:
        return self.view.unknown(keys)

    def keeping(self, keys: Collection[str]) -> AbstractContextManager[None]:
        return self.view.keeping(keys)

    async def know(self, keys: Collection[str]) -> None:
        await self.view.know(keys)

    @property
    def val_of(self) -> Callable[[str], str | None]:
        return self.view.held.val_of

    async def catch_up(self) -> None:
        await self.view.catch_up()

    def updates(self, made: "Made", time: int) -> "pa.Table":
        return self.view.kind.updates(made.changes, made.old, time)

    def committed(self, lower: Antichain, upper: Antichain, changes: Mapping[str, str | None]) -> None:
        self.view.committed(lower, upper, changes)


class PlainMember(Member):
    """A shard without keys: rows are appended to it. Two are equal if their shard is the same, and the schema
    of their rows: it has one version in a commit, whichever of its writers is used."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlainMember) or self.writer.shard is not other.writer.shard:
            return False
        return self.writer.context.schema_id == other.writer.context.schema_id

    def __hash__(self) -> int:
        return hash(self.writer.shard.id)

    @property
    def upper(self) -> Antichain:
        return self.state.upper

    @property
    def val_of(self) -> Callable[[str], str | None]:
        return lambda key: None

    def check_schema(self) -> None:
        """Rows of an older schema may be appended."""

    async def catch_up(self) -> None:
        """Its state is all that is needed."""

    def updates(self, made: "Made", time: int) -> "pa.Table":
        return at_time(concat(made.rows, self.writer.schema), time, self.writer.schema)

    def committed(self, lower: Antichain, upper: Antichain, changes: Mapping[str, str | None]) -> None:
        """The state says so."""
