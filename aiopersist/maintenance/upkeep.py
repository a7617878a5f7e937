"""When a client imports the code of maintenance, a tenth of the library: a short process that only reads
never does.

The import happens when this process has changed the contents of a shard, when the client has had a shard open
for a second, or when a call needs it. It runs on a worker thread. Then all work that is due begins at once.
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
        """The shards that were added before the import."""
        self._contents: dict[str, tuple[Antichain, Antichain]] = {}
        """By shard, the frontiers after the first commit of this process."""
        self._waiting = self._importing = False

    def add(self, shard: Shard) -> None:
        """Be ready to maintain `shard`, and maintain it in the background after commits."""
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
        """The maintenance; imports it if necessary."""
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
        """As `now`, with the import on a thread."""
        if not are_imported([CODE]):
            await self._stack.imported(CODE)
        return self.now()

    async def aclose(self) -> None:
        """End the registrations, and with them the claims of cancelled work."""
        if self._maintenance is not None:
            await self._maintenance.aclose()

    def _committed(self, state: State) -> None:
        """After a commit of this process. The registration of a reader or writer changes no contents."""
        contents = (state.since, state.upper)
        if self._contents.setdefault(state.shard, contents) != contents and not self._importing:
            self._importing = True
            self._stack.supervisor.background(self.ready(), "import maintenance")

    async def _later(self) -> None:
        await self._stack.runtime.sleep(WAIT_S)
        if self._early:
            await self.ready()
        self._waiting = False
