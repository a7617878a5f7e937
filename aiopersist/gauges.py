"""What needs no counting: queues, handles and the cache of a client, read when a view of its metrics is asked
for, in whatever thread."""

from collections import Counter

from aiopersist.measure.metrics import Observed
from aiopersist.measure.view import HandlesView, QueuesView
from aiopersist.read.handle import ReadHandle
from aiopersist.read.since import SinceHandle
from aiopersist.resource import Handle
from aiopersist.shard.shards import Shards
from aiopersist.subscription.subscription import Subscription
from aiopersist.table.group import TableCommits
from aiopersist.write.handle import WriteHandle


def observed(shards: Shards, tables: TableCommits) -> Observed:
    """All of them as they are now."""
    stack, handles = shards.stack, shards.handles()
    return Observed(
        failures=stack.supervisor.failures.count,
        cache=stack.blob.view(),
        queues=queues(shards, handles, tables),
        handles=HandlesView(**Counter(kind_of(handle) for handle in handles)),
    )


def queues(shards: Shards, handles: list[Handle], tables: TableCommits) -> QueuesView:
    """The queues above the stores."""
    registers, threads = shards.registers(), shards.stack.threads.statistics()
    writes = sum(handle._queueing for handle in handles if isinstance(handle, WriteHandle))
    return QueuesView(
        writes=writes + tables.queueing,
        commits=sum(register.queueing for register in registers),
        waiters=sum(register.waiters for register in registers),
        computing=threads.borrowed_tokens,
        compute=threads.tasks_waiting,
    )


def kind_of(handle: Handle) -> str:
    """The field of `HandlesView` that counts it."""
    if isinstance(handle, WriteHandle):
        return "writers"
    if isinstance(handle, ReadHandle):
        return "holds" if handle._has_hold else "readers"
    if isinstance(handle, SinceHandle):
        return "holds"
    return "subscriptions" if isinstance(handle, Subscription) else "others"
