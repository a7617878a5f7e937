"""Metrics that are read, not counted: queues, handles and the cache of a client, at the call for a view of
the metrics, in any thread."""

from collections import Counter
from collections.abc import Callable

from aiopersist.base.resource import Handle
from aiopersist.measure.metrics import Observed
from aiopersist.read.handle import ReadHandle
from aiopersist.shard.shards import Shards

FIELDS = {"WriteHandle": "writers", "SinceHandle": "holds", "Subscription": "subscriptions"}
"""The field of `HandlesView` that counts a handle, by the name of its class, which need not be imported."""


def observed(shards: Shards, in_tables: Callable[[], int]) -> Observed:
    """The current values. `in_tables` counts the operations on tables that wait for a group commit."""
    stack, handles = shards.stack, shards.handles()
    return Observed(
        failures=stack.supervisor.failures.count,
        cache=stack.blob.counts(),
        queues=queues(shards, handles, in_tables()),
        handles=Counter(kind_of(handle) for handle in handles),
    )


def queues(shards: Shards, handles: list[Handle], in_tables: int) -> dict[str, int]:
    """The queues above the stores: fields of `QueuesView`."""
    registers, threads = shards.registers(), shards.stack.threads
    return {
        "writes": in_tables + sum(getattr(handle, "_queueing", 0) for handle in handles),
        "commits": sum(register.queueing for register in registers),
        "waiters": sum(register.waiters for register in registers),
        "computing": threads.running,
        "compute": threads.waiting,
    }


def kind_of(handle: Handle) -> str:
    """The field of `HandlesView` that counts it."""
    if isinstance(handle, ReadHandle):
        return "holds" if handle._has_hold else "readers"
    return FIELDS.get(type(handle).__name__, "others")
