"""All limits. The name has the unit; the docstring has the reason.

Each setting may also come from an environment variable: `AIOPERSIST_` and the name in capitals. An argument
wins over the environment. Unknown names are refused in both, so that typos are noticed.
"""

import os
from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from aiopersist.base.errors import InvalidUsage, UsageKind, shown

PREFIX = "AIOPERSIST_"
# Variables with the prefix that are no settings: the location, the inspector's token, those of tests.
LOCATION_NAMES = ("LOCATION", "BLOB", "CONSENSUS")
TOKEN_NAME = "WEB_TOKEN"
TEST_PREFIX = "TEST_"

MIB = 1024 * 1024

SECONDS_MAX = 100 * 365.25 * 24 * 3600  # a century: clocks cannot add much longer times
Seconds = Annotated[float, Field(gt=0, le=SECONDS_MAX, allow_inf_nan=False)]


class UntrimmableColumns(BaseModel, frozen=True, extra="forbid"):
    """Columns whose statistics stay, even beyond the budget: patterns in lower case, compared with
    the last component of a column's dotted name."""

    equals: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()

    def should_retain(self, name: str) -> bool:
        """Whether the statistics of the column `name` (`key`, `val`, `val.amount`) must stay."""
        last = name.rpartition(".")[2].lower()
        return last in self.equals or last.startswith(self.prefixes) or last.endswith(self.suffixes)


def _untrimmable(value: Any) -> Any:
    return UntrimmableColumns.model_validate_json(value) if isinstance(value, str) else value


class Settings(BaseModel, frozen=True, extra="forbid"):
    """The limits of a client. Names in `_s` are seconds, a century at most; names in `_bytes` are bytes. Zero
    means none or never. The last nine are deprecated since 0.2: nobody can choose them better than their
    defaults, so they become constants."""

    # Stores
    open_timeout_s: Seconds = 30.0
    """How long an opening waits for a store that it cannot reach."""
    retry_timeout_s: Annotated[float, Field(ge=0, le=SECONDS_MAX, allow_inf_nan=False)] | None = None
    """How long each request to a store is repeated after transient failures; `None`: for ever, since callers
    have their own timeouts. A call with several requests, or in a group, may take a multiple."""
    blob_cache_bytes: NonNegativeInt = 64 * MIB
    """Blobs that a client keeps in memory, so that successive snapshots fetch nothing twice."""
    watch_timeout_s: Seconds = 5.0
    """How often a waiter looks without a hint: bounds the latency after a lost hint."""

    # What can be measured
    metrics: bool = True
    """Whether `client.metrics` counts: at most 2 % of a small append."""
    client_name: str = ""
    """The name of this client in its metrics (empty: a number, if a process has several clients), and in the
    ids of its readers, named holds and subscriptions, which end in `@name/host:pid`."""

    # Leases
    reader_lease_s: Seconds = 900.0
    """A reader without a heartbeat for this long holds no history any more."""
    writer_lease_s: Seconds = 3600.0
    """A writer without a heartbeat for this long ends, with its staged batches; uploads are slow."""
    ack_every_s: Seconds = 0.1
    """An acknowledgement of a subscription is durable within this time: many share one commit."""
    txn_retention_s: Seconds = 90 * 24 * 3600.0
    """How long a shard remembers the last transaction number of an application."""
    once_keep_s: Seconds = 24 * 3600.0
    """How long a shard remembers an id of `once=`, unless 100,000 newer ids come earlier. Use one value for
    all clients of a location, since each applies its own."""
    clock_ahead_max_s: Seconds = 3600.0
    """How far beyond now an append may move the upper of a shard with a wall clock: all tables that share a
    commit get its times. Also the greatest step of a bucket's clock that is believed, unless this machine's
    clock agrees."""
    tombstone_retention_s: Seconds = 30 * 24 * 3600.0
    """The least time for which the tombstone and the freed name of a dropped shard are kept: longer than a
    process that creates the shard can stand still, or its statement can be under way."""

    # Parts
    blob_target_size: NonNegativeInt = 128 * MIB
    """Goodbytes at which a buffer becomes a part: large enough that the cost of requests does not matter."""
    batch_builder_max_outstanding_parts: PositiveInt = 2
    """Parts that a builder encodes or uploads at once: one is encoded while another is sent."""
    update_size_max: PositiveInt = 64 * MIB
    """Goodbytes of the key and value of one update: an update is never split."""
    row_group_bytes: PositiveInt = 8 * MIB
    """Goodbytes of a row group, the least that a reader fetches of a run."""
    inline_writes_single_max_bytes: NonNegativeInt = 16 * 1024
    """Goodbytes below which a part is inline: one synced record instead of a file and a record."""
    inline_writes_total_max_bytes: NonNegativeInt = MIB
    """Bytes of inline parts per shard: bounds the state."""
    stats_budget_bytes: NonNegativeInt = 1024
    """Bytes of statistics per part in the state."""
    stats_untrimmable_columns: Annotated[UntrimmableColumns, BeforeValidator(_untrimmable)] = Field(
        default_factory=UntrimmableColumns
    )
    """Columns whose statistics stay beyond the budget."""

    # Reading
    fetch_max_outstanding_parts: PositiveInt = 8
    """Parts fetched at once per snapshot: hides the latency of an object store."""
    read_memory_bytes: PositiveInt = 256 * MIB
    """The approximate memory of one read that merges sorted runs (`batches()`, a piece of a shared read), for
    any size of input: the more runs, the less is decoded at once. In addition, one fetched row group of each
    run."""

    # Tables
    table_resident_bytes: NonNegativeInt = 64 * MIB
    """Memory of one table in a client, resident up to this size; else new and recently used keys."""

    # Maintenance
    compaction_memory_bytes: PositiveInt = 256 * MIB
    """Memory of one compaction, for any size of input."""
    compaction_inputs_min: PositiveInt = 8
    """The number of batches or runs that is worth a compaction while appends come. Four to sixteen inline
    ones, by size, count as one; `2`: any two. An idle shard is compacted as far as its spine says."""

    # Deprecated since 0.2; each still works
    txn_ids_max: PositiveInt = 1_000_000
    """Applications that a shard remembers: bounds its state in memory. One more is refused."""
    rollup_every: PositiveInt = 128
    """Versions between two rollups of a shard: bounds the reads of an opening."""
    stats_collection_enabled: bool = True
    """Whether parts carry the least and greatest value of each column."""
    indexed_inline_total_max_bytes: NonNegativeInt = 8 * MIB
    """Bytes of inline parts per `Indexed`: bounds its state, which serves many streams."""
    indexed_step_s: Seconds = 1.0
    """The least time between two steps of an `Indexed`'s background task, while there are changes."""
    listen_queue_max: PositiveInt = 1024
    """Commits by which a listener of a stream may lag behind: bounds its waiting events."""
    stash_idle_in_transaction_s: Seconds = 10.0
    """After this time the server ends a transaction whose client is gone: bounds the wait of a take-over."""
    compaction_idle_s: Seconds = 10.0
    """How often idle shards are looked at."""
    compactions_max: PositiveInt = 2
    """Compactions that a client runs at once; the others wait."""

    @model_validator(mode="wrap")
    @classmethod
    def _with_environment(cls, values: dict[str, Any], handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler({**_environment(), **values})
        except ValidationError as error:
            details = [_naming(detail, values) for detail in error.errors()]
            raise ValidationError.from_exception_data(error.title, details) from None


def _environment() -> dict[str, str]:
    """The settings in the environment, by name."""
    variables = {n.removeprefix(PREFIX): text for n, text in os.environ.items() if n.startswith(PREFIX)}
    return {
        name.lower(): text
        for name, text in variables.items()
        if name not in (*LOCATION_NAMES, TOKEN_NAME) and not name.startswith(TEST_PREFIX)
    }


def _naming(detail: Any, arguments: dict[str, Any]) -> InitErrorDetails:
    """The detail of an error, with the name of the variable for a value from the environment. The text of a
    variable that is no setting is hidden, since it may be a secret."""
    name, *rest = map(str, detail["loc"] or ("",))
    prefix, spelled = ("", str) if name in arguments else (PREFIX, str.upper)
    text, value = detail["msg"], detail["input"]
    if detail["type"] == "extra_forbidden":
        from difflib import get_close_matches

        close = [prefix + spelled(match) for match in get_close_matches(name, Settings.model_fields, 1)]
        text = f"there is no such setting{f': is it {close[0]}?' if close else ''}"
        value = value if name in arguments else "..."
    kind = PydanticCustomError("setting", text)
    return InitErrorDetails(type=kind, loc=(prefix + spelled(name), *rest), input=value)


def settings_or_environment(settings: Settings | None) -> Settings:
    """`settings` (`TypeError` for another type), or those of the environment (`InvalidUsage` names a
    variable)."""
    if settings is not None and not isinstance(settings, Settings):
        raise TypeError(f"{shown(settings)} is not an aiopersist.Settings")
    if settings is not None:
        return settings
    try:
        return Settings()
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, d['loc']))}={shown(d['input'])}: {d['msg']}" for d in error.errors())
        raise InvalidUsage(UsageKind.INVALID_SETTING, "; ".join(faults)) from error
