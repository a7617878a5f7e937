"""The shards that a group commit writes: tables, plain shards with a wall clock that transactions append to,
and internal ones that remember the ids of transactions."""

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
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
from aiopersist.table.view.view import View
from aiopersist.write.session import Session

if TYPE_CHECKING:
    import pyarrow as pa  # type: ignore[import-untyped]  # pyarrow ships no stubs


class Made(Struct, eq=False):
    """What a commit makes of one shard."""

    changes: Mapping[str, str | None] = {}
    """The net changes by key."""
    old: Mapping[str, str | None] = {}
    """The values that they replace."""
    rows: "list[pa.Table]" = []
    size: int = 0
    """About its bytes."""


class Participant:
    """One shard, as the group commit sees it."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.register: Register = shard.register
        """Its newest state, and the races for the next one."""

    @property
    def state(self) -> State:
        """The newest state that this process knows."""
        return self.shard.state

    async def look(self) -> None:
        """Read its head. One request, shared with others that wait."""
        await self.shard.open()

    def check_schema(self) -> None:
        """`CodecMismatch` if values may have fields by now that its writer does not know: it would retract
        what is not there."""

    @property
    def upper(self) -> Antichain:
        """The frontier at which it is planned."""
        return self.state.upper

    @property
    def version(self) -> object:
        """What is another one once the values before `upper` may be others."""
        return self.upper

    @property
    def knows_all(self) -> bool:
        """Whether no key is ever unknown."""
        return True

    def unknown(self, keys: Iterable[str]) -> list[str]:
        """Those keys whose values must be looked up before `val_of`."""
        return []

    def keeping(self, keys: Collection[str]) -> AbstractContextManager[None]:
        """Within it these keys stay known, once they are."""
        return nullcontext()

    async def know(self, keys: Collection[str]) -> None:
        """Look up the unknown ones of keys that are kept."""
        assert not self.unknown(keys)

    @property
    def val_of(self) -> Callable[[str], str | None]:
        """Gives the value of a known key before `upper`, as text."""
        return lambda key: None

    async def catch_up(self) -> None:
        """Move `upper` to that of the newest state that this process knows."""

    def take(self, lower: Antichain, upper: Antichain, changes: Mapping[str, str | None]) -> None:
        """A commit of this process replaced `lower` by `upper`, with these few changes."""

    @property
    def settling(self) -> "asyncio.Task[None] | None":
        """What puts in order what was taken, if that goes on: the next changes take longer until its end."""
        return None

    def committed(
        self, lower: Antichain, upper: Antichain, changes: Mapping[str, str | None]
    ) -> AbstractAsyncContextManager[Callable[[], None] | None]:
        """A commit of this process replaced `lower` by `upper`, with these changes. It prepares what takes
        long and gives what takes them, in one turn of the loop; `None` if nothing need be done."""
        return nullcontext()


class RecordParticipant(Participant):
    """An internal shard that remembers ids of transactions. It has no data, and its upper stays."""


class WrittenParticipant(Participant):
    """A shard that is appended to."""

    def __init__(self, writer: Session) -> None:
        super().__init__(writer.shard)
        self.writer = writer

    @abstractmethod
    def updates(self, made: Made, time: int) -> "pa.Table | Tiny":
        """The updates of a commit at `time`, if there are any."""


class TableParticipant(WrittenParticipant):
    """A table."""

    def __init__(self, view: View, writer: Session) -> None:
        super().__init__(writer)
        self.view = view

    def check_schema(self) -> None:
        if self.writer.context.schema_id != self.state.schema_id:
            stored = self.shard.schema(self.state.schema_id)
            raise mismatch(stored, self.writer.schema, shard_id=self.shard.id)

    @property
    def upper(self) -> Antichain:
        return self.view.upper

    @property
    def version(self) -> object:
        return self.view.upper, self.view.version

    @property
    def knows_all(self) -> bool:
        return self.view.is_resident

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

    def updates(self, made: Made, time: int) -> "pa.Table | Tiny":
        given = made.changes, made.old, time
        return self.view.kind.few_updates(*given) or self.view.kind.updates(*given)

    def take(self, lower: Antichain, upper: Antichain, changes: Mapping[str, str | None]) -> None:
        self.view.take(lower, upper, changes)

    @property
    def settling(self) -> "asyncio.Task[None] | None":
        return self.view.settling

    def committed(
        self, lower: Antichain, upper: Antichain, changes: Mapping[str, str | None]
    ) -> AbstractAsyncContextManager[Callable[[], None]]:
        return self.view.committed(lower, upper, changes)


class ShardParticipant(WrittenParticipant):
    """A shard without keys: rows are appended to it, of an older schema, too. Two are equal if their shard is
    the same, and the schema of their rows: it has one version in a commit, whichever of its writers is
    used."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ShardParticipant) or self.shard is not other.shard:
            return False
        return self.writer.context.schema_id == other.writer.context.schema_id

    def __hash__(self) -> int:
        return hash(self.shard.id)

    def updates(self, made: Made, time: int) -> "pa.Table":
        return at_time(concat(made.rows, self.writer.schema), time, self.writer.schema)


def check_distinct(members: Collection[Participant]) -> None:
    """`InvalidUsage` if two views of one table take part: it has one version in a commit."""
    seen: set[Shard] = set()
    for member in members:
        shard = member.shard
        if shard in seen:
            text = f"{shard.label} takes part twice: by its name and its id, or with two types"
            raise InvalidUsage(UsageKind.INVALID_APPEND, text, shard_id=shard.id)
        seen.add(shard)
