"""Durable, definite, time-varying collections for asyncio.

`ap.open` gives a client; `client.writer` and `client.reader` give handles on a shard.

`import aiopersist` imports what every client needs. A name of what only some use is imported when it is first
looked up.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aiopersist.client import Client
from aiopersist.data.part.stats import ColumnStats
from aiopersist.data.types.schema import Codec, Schema
from aiopersist.data.updates.updates import Update, Updates
from aiopersist.errors import (
    AlreadyAppended,
    BatchExpired,
    CodecMismatch,
    Conflict,
    Corruption,
    DiffOverflow,
    Error,
    IncompatibleSchema,
    Indeterminate,
    InvalidLocation,
    InvalidUpdate,
    InvalidUsage,
    KeyExists,
    LeaseExpired,
    MissingPart,
    NotReadable,
    OpaqueMismatch,
    SchemaMismatch,
    ShardFinalized,
    SinceViolation,
    StorageUnavailable,
    SubscriptionExpired,
    UnknownShard,
    Unsupported,
    UpperMismatch,
    UsageKind,
)
from aiopersist.frontier import Antichain, Description, advance
from aiopersist.opening import open  # noqa: A004  # `ap.open`
from aiopersist.read.handle import ReadHandle
from aiopersist.read.leased import LeasedPart
from aiopersist.read.listen import Listen, Progress, Step
from aiopersist.read.snapshot import Snapshot, SnapshotStats
from aiopersist.settings import Settings, UntrimmableColumns
from aiopersist.shard.catalog import ShardId
from aiopersist.state.keys import BlobKey
from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus, Entry, Versioned
from aiopersist.storage.urls import (
    Location,
    open_blob,
    open_consensus,
    register_blob_scheme,
    register_consensus_scheme,
)

if TYPE_CHECKING:
    from aiopersist import stash
    from aiopersist.compact.shared_compaction import SharedCompaction
    from aiopersist.erase.erasure import Erasure
    from aiopersist.erase.search import Remnant
    from aiopersist.gc.collect import Collected
    from aiopersist.gc.sweep import Sweep, Usage
    from aiopersist.maintenance.fsck import FsckReport
    from aiopersist.maintenance.holds import Holder
    from aiopersist.maintenance.inspect import ShardView
    from aiopersist.maintenance.overview import ShardSummary
    from aiopersist.maintenance.rounds import MaintenanceRound
    from aiopersist.measure.view import MetricsView
    from aiopersist.progress import Track, WorkDone, track
    from aiopersist.read.shared_read import SharedRead
    from aiopersist.read.since import SinceHandle
    from aiopersist.subscription.step import SubscribedUpdates, SubscriptionStep
    from aiopersist.subscription.subscription import Subscription
    from aiopersist.subscription.view import SubscriptionView
    from aiopersist.table.feed import Change, Feed, FeedStep
    from aiopersist.table.held import TableView
    from aiopersist.table.plan import Repeated
    from aiopersist.table.ranges import ReadRange
    from aiopersist.table.subscribe import SubscribedChanges
    from aiopersist.table.table import Table
    from aiopersist.table.transaction import Transaction
    from aiopersist.write.append_many import Append
    from aiopersist.write.batch import Batch, Part
    from aiopersist.write.builder import Added, BatchBuilder
    from aiopersist.write.handle import WriteHandle
    from aiopersist.write.pending import Committed, NotCommitted

__version__ = "0.1.0"

__all__ = [
    "Added",
    "AlreadyAppended",
    "Antichain",
    "Append",
    "Batch",
    "BatchBuilder",
    "BatchExpired",
    "Blob",
    "BlobKey",
    "Change",
    "Client",
    "Codec",
    "CodecMismatch",
    "ColumnStats",
    "Collected",
    "Committed",
    "Conflict",
    "Consensus",
    "Corruption",
    "Description",
    "DiffOverflow",
    "Entry",
    "Erasure",
    "Error",
    "Feed",
    "FeedStep",
    "FsckReport",
    "Holder",
    "IncompatibleSchema",
    "Indeterminate",
    "InvalidLocation",
    "InvalidUpdate",
    "InvalidUsage",
    "KeyExists",
    "ReadRange",
    "LeaseExpired",
    "MissingPart",
    "LeasedPart",
    "Listen",
    "Location",
    "MaintenanceRound",
    "MetricsView",
    "NotCommitted",
    "NotReadable",
    "OpaqueMismatch",
    "Part",
    "Progress",
    "ReadHandle",
    "Remnant",
    "Repeated",
    "Schema",
    "SchemaMismatch",
    "Settings",
    "ShardFinalized",
    "ShardId",
    "ShardSummary",
    "ShardView",
    "SharedCompaction",
    "SharedRead",
    "SinceHandle",
    "SinceViolation",
    "Snapshot",
    "SnapshotStats",
    "Step",
    "StorageUnavailable",
    "SubscribedChanges",
    "SubscribedUpdates",
    "Subscription",
    "SubscriptionExpired",
    "SubscriptionStep",
    "SubscriptionView",
    "Sweep",
    "Table",
    "TableView",
    "Track",
    "Transaction",
    "UnknownShard",
    "Unsupported",
    "UntrimmableColumns",
    "Update",
    "Updates",
    "UpperMismatch",
    "Usage",
    "UsageKind",
    "Versioned",
    "WorkDone",
    "WriteHandle",
    "advance",
    "open",
    "open_blob",
    "open_consensus",
    "register_blob_scheme",
    "register_consensus_scheme",
    "stash",
    "track",
]

_LATER = {
    "SharedCompaction": "aiopersist.compact.shared_compaction",
    "Erasure": "aiopersist.erase.erasure",
    "Remnant": "aiopersist.erase.search",
    "Collected": "aiopersist.gc.collect",
    "Sweep": "aiopersist.gc.sweep",
    "Usage": "aiopersist.gc.sweep",
    "FsckReport": "aiopersist.maintenance.fsck",
    "Holder": "aiopersist.maintenance.holds",
    "ShardView": "aiopersist.maintenance.inspect",
    "ShardSummary": "aiopersist.maintenance.overview",
    "MaintenanceRound": "aiopersist.maintenance.rounds",
    "MetricsView": "aiopersist.measure.view",
    "Track": "aiopersist.progress",
    "WorkDone": "aiopersist.progress",
    "track": "aiopersist.progress",
    "SharedRead": "aiopersist.read.shared_read",
    "SinceHandle": "aiopersist.read.since",
    "SubscribedUpdates": "aiopersist.subscription.step",
    "SubscriptionStep": "aiopersist.subscription.step",
    "Subscription": "aiopersist.subscription.subscription",
    "SubscriptionView": "aiopersist.subscription.view",
    "Change": "aiopersist.table.feed",
    "Feed": "aiopersist.table.feed",
    "FeedStep": "aiopersist.table.feed",
    "Repeated": "aiopersist.table.plan",
    "ReadRange": "aiopersist.table.ranges",
    "SubscribedChanges": "aiopersist.table.subscribe",
    "Table": "aiopersist.table.table",
    "TableView": "aiopersist.table.held",
    "Transaction": "aiopersist.table.transaction",
    "Append": "aiopersist.write.append_many",
    "Batch": "aiopersist.write.batch",
    "Part": "aiopersist.write.batch",
    "Added": "aiopersist.write.builder",
    "BatchBuilder": "aiopersist.write.builder",
    "WriteHandle": "aiopersist.write.handle",
    "Committed": "aiopersist.write.pending",
    "NotCommitted": "aiopersist.write.pending",
    "stash": "aiopersist.stash",
}
"""The names that are imported when they are first looked up, and their modules."""


def __getattr__(name: str) -> Any:
    module = _LATER.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = import_module(module)
    value = globals()[name] = found if module == f"{__name__}.{name}" else getattr(found, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
