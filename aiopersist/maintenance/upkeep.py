"""When a client needs the code of maintenance, which is a tenth of the library: a process that only reads,
and ends soon, never imports it.

It is imported when this process has changed the contents of a shard, when the client has had a shard open for
a second, or when a call asks for it; on a worker thread, beside the event loop. What a shard owes by then is
begun at once.
"""

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from aiopersist.base.frontier import Antichain
from aiopersist.data.lazy import are_imported
from aiopersist.shard.shard import Shard
from aiopersist.shard.stack import Stack
from aiopersist.state.model import State

if TYPE_CHECKING:
    from aiopersist.maintenance.background import Maintenance

CODE = "aiopersist.maintenance.background"
WAIT_S = 1.0  # a process that lives for longer maintains what it reads


class Upkeep:
    """The maintenance of the shards of one client. `background=False`: only on demand."""

    def __init__(self, stack: Stack, *, background: bool) -> None:
        self._stack = stack
        self._background = background
        self._maintenance: Maintenance | None = None
        self._early: WeakValueDictionary[str, Shard] = WeakValueDictionary()
        """The shards that were seen before."""
        self._contents: dict[str, tuple[Antichain, Antichain]] = {}
        """By shard, the frontiers after the first commit of this process."""
        self._waiting = self._importing = False

    def add(self, shard: Shard) -> None:
        """Be ready to maintain `shard`, and do the maintenance that its commits owe in the background."""
        if self._maintenance is None and are_imported([CODE]):
            self.now()
        if self._maintenance is not None:
            self._maintenance.add(shard)
            return
        self._early[shard.id] = shard
        if self._background:
            shard.register.on_commit = self._committed
            if not self._waiting:
                self._waiting = True
                self._stack.supervisor.background(self._later(), "wait for maintenance")

    def now(self) -> "Maintenance":
        """The maintenance, imported here if that did not happen before."""
        if self._maintenance is None:
            from aiopersist.maintenance.background import Maintenance

            self._maintenance = Maintenance(self._stack, background=self._background)
            for shard in list(self._early.values()):
                self._maintenance.add(shard)
                state = shard.register.state
                begin_due = shard.register.on_commit
                if self._background and begin_due is not None and state is not None and not state.finalized:
                    begin_due(state)
            self._early.clear()
            self._contents.clear()
        return self._maintenance

    async def ready(self) -> "Maintenance":
        """The same; what is imported is imported on a thread."""
        if not are_imported([CODE]):
            await self._stack.imported(CODE)
        return self.now()

    async def aclose(self) -> None:
        """End the registrations, and so the claims of the work that is cut off."""
        if self._maintenance is not None:
            await self._maintenance.aclose()

    def _committed(self, state: State) -> None:
        """A commit of this process. One that registers a reader or a writer changes no contents."""
        contents = (state.since, state.upper)
        if self._contents.setdefault(state.shard, contents) != contents and not self._importing:
            self._importing = True
            self._stack.supervisor.background(self.ready(), "import maintenance")

    async def _later(self) -> None:
        await self._stack.runtime.sleep(WAIT_S)
        if self._early:
            await self.ready()
        self._waiting = False
