"""Durable, definite, time-varying collections for asyncio.

`ap.open` gives a client; `client.writer` and `client.reader` give handles on a shard.

A name is imported when it is first looked up: `import aiopersist` alone imports nothing. A client takes 0.1 s
of processor time: a program that looks up `ap.Client` before its event loop runs imports it there.
"""

import concurrent.futures.thread  # noqa: F401  # cannot be imported once the main thread has ended
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aiopersist import stash
    from aiopersist.base.errors import (
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
        NegativeMultiplicity,
        NotReadable,
        OpaqueMismatch,
        SchemaMismatch,
        ShardFinalized,
        SinceViolation,
        StorageUnavailable,
        SubscriptionExpired,
        TagExists,
        UnknownShard,
        UnknownTag,
        Unsupported,
        UpperMismatch,
        UsageKind,
    )
    from aiopersist.base.frontier import Antichain, Description, advance
    from aiopersist.base.progress import Track, WorkDone, track
    from aiopersist.base.settings import Settings, UntrimmableColumns
    from aiopersist.client.admin import Admin
    from aiopersist.client.client import Client
    from aiopersist.client.open import open  # noqa: A004  # `ap.open`
    from aiopersist.client.workers import Workers
    from aiopersist.compact.shared_compaction import SharedCompaction
    from aiopersist.data.part.stats import ColumnStats
    from aiopersist.data.types.schema import Codec, Schema
    from aiopersist.data.updates.updates import Update, Updates
    from aiopersist.erase.erasure import Erasure
    from aiopersist.erase.search import Remnant
    from aiopersist.gc.collect import Collected
    from aiopersist.gc.sweep import Sweep, Usage
    from aiopersist.iceberg.publish import Published
    from aiopersist.maintenance.fsck import FsckReport
    from aiopersist.maintenance.holds import Holder
    from aiopersist.maintenance.inspect import ShardView
    from aiopersist.maintenance.overview import ShardSummary
    from aiopersist.maintenance.rounds import MaintenanceRound
    from aiopersist.maintenance.tags import TagView
    from aiopersist.measure.view import MetricsView
    from aiopersist.read.handle import ReadHandle
    from aiopersist.read.leased import LeasedPart
    from aiopersist.read.listen import Listen, Progress, Step
    from aiopersist.read.shared_read import SharedRead
    from aiopersist.read.since import SinceHandle
    from aiopersist.read.snapshot import Snapshot, SnapshotStats
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
    from aiopersist.subscription.step import SubscribedUpdates, SubscriptionStep
    from aiopersist.subscription.subscription import Subscription
    from aiopersist.subscription.view import SubscriptionView
    from aiopersist.table.commit.plan import Repeated
    from aiopersist.table.feed import Change, Feed, FeedStep, SubscribedChanges
    from aiopersist.table.ranges import ReadRange
    from aiopersist.table.table import Table
    from aiopersist.table.transaction.transaction import Transaction
    from aiopersist.table.view.contents import TableView
    from aiopersist.write.append_many import Append
    from aiopersist.write.batch import Batch, Part
    from aiopersist.write.builder import Added, BatchBuilder
    from aiopersist.write.handle import WriteHandle
    from aiopersist.write.pending import Committed, NotCommitted

__version__ = "0.2.0"

__all__ = [
    "Added",
    "Admin",
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
    "NegativeMultiplicity",
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
    "Published",
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
    "TagExists",
    "TagView",
    "Track",
    "Transaction",
    "UnknownShard",
    "UnknownTag",
    "Unsupported",
    "UntrimmableColumns",
    "Update",
    "Updates",
    "UpperMismatch",
    "Usage",
    "UsageKind",
    "Versioned",
    "WorkDone",
    "Workers",
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

_NAMES = {
    "client.admin": "Admin",
    "client.client": "Client",
    "client.workers": "Workers",
    "compact.shared_compaction": "SharedCompaction",
    "data.part.stats": "ColumnStats",
    "data.types.schema": "Codec Schema",
    "data.updates.updates": "Update Updates",
    "erase.erasure": "Erasure",
    "erase.search": "Remnant",
    "base.errors": (
        "AlreadyAppended BatchExpired CodecMismatch Conflict Corruption DiffOverflow Error "
        "IncompatibleSchema Indeterminate InvalidLocation InvalidUpdate InvalidUsage KeyExists "
        "LeaseExpired MissingPart NegativeMultiplicity NotReadable OpaqueMismatch SchemaMismatch "
        "ShardFinalized SinceViolation StorageUnavailable SubscriptionExpired TagExists UnknownShard "
        "UnknownTag Unsupported UpperMismatch UsageKind"
    ),
    "base.frontier": "Antichain Description advance",
    "gc.collect": "Collected",
    "gc.sweep": "Sweep Usage",
    "iceberg.publish": "Published",
    "maintenance.fsck": "FsckReport",
    "maintenance.holds": "Holder",
    "maintenance.inspect": "ShardView",
    "maintenance.overview": "ShardSummary",
    "maintenance.rounds": "MaintenanceRound",
    "maintenance.tags": "TagView",
    "measure.view": "MetricsView",
    "client.open": "open",
    "base.progress": "Track WorkDone track",
    "read.handle": "ReadHandle",
    "read.leased": "LeasedPart",
    "read.listen": "Listen Progress Step",
    "read.shared_read": "SharedRead",
    "read.since": "SinceHandle",
    "read.snapshot": "Snapshot SnapshotStats",
    "base.settings": "Settings UntrimmableColumns",
    "shard.catalog": "ShardId",
    "stash": "stash",
    "state.keys": "BlobKey",
    "storage.blob": "Blob",
    "storage.consensus": "Consensus Entry Versioned",
    "storage.urls": "Location open_blob open_consensus register_blob_scheme register_consensus_scheme",
    "subscription.step": "SubscribedUpdates SubscriptionStep",
    "subscription.subscription": "Subscription",
    "subscription.view": "SubscriptionView",
    "table.feed": "Change Feed FeedStep SubscribedChanges",
    "table.view.contents": "TableView",
    "table.commit.plan": "Repeated",
    "table.ranges": "ReadRange",
    "table.table": "Table",
    "table.transaction.transaction": "Transaction",
    "write.append_many": "Append",
    "write.batch": "Batch Part",
    "write.builder": "Added BatchBuilder",
    "write.handle": "WriteHandle",
    "write.pending": "Committed NotCommitted",
}
"""The names of each module."""

_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    own = f"{__name__}.{name}"
    module = _MODULES.get(name, own)
    try:
        imported = import_module(module)
    except ModuleNotFoundError as error:
        if error.name != own:
            raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = globals()[name] = imported if module == own else getattr(imported, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
