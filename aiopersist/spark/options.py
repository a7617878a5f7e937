"""The options of `format("aiopersist")`. Spark passes them as text, with names in lower case.

`asOf` and `as_of` are the same option. An option that is unknown or useless for the call is refused: a
misspelt option must not silently change the result.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from aiopersist.base.errors import InvalidUsage, UsageKind
from aiopersist.data.lazy import pa
from aiopersist.spark.location import SparkLocation
from aiopersist.spark.plan import APPEND, DELETE, OVERWRITE, UPSERT, WriteSpec
from aiopersist.spark.sessions import arrow_schema

PLACE = {"path", "location", "blob", "consensus"}
READ = PLACE | {
    "asof",
    "tag",
    "startingtime",
    "endingtime",
    "expand",
    "columns",
    "where",
    "keyrange",
    "parallelism",
    "leases",
}
WRITE = PLACE | {"time", "diff", "keys", "schema", "apply", "txnappid", "txnversion", "parallelism", "leases"}
STREAM_READ = PLACE | {
    "startingtime",
    "columns",
    "where",
    "keyrange",
    "expand",
    "parallelism",
    "holdname",
    "leases",
    "maxrowspertrigger",
    "maxbytespertrigger",
}
STREAM_WRITE = PLACE | {"time", "diff", "keys", "schema", "apply", "txnappid", "parallelism", "leases"}
INSERT = "insert"
SPARKS_OWN = {"checkpointlocation", "queryname"}  # options of Spark that sinks also get

LOST = (
    "a shard is no table of Spark's catalog: saveAsTable, writeTo and CREATE TABLE lose their options. Write "
    "with save(...) or write_df, read with load(...), or use CREATE TEMPORARY VIEW ... USING aiopersist "
    "OPTIONS (...)"
)
OF_A_TABLE = {"provider", "owner"}  # properties that Spark passes when it creates a table
LEASE_S = 24 * 3600.0
TASKS = 8  # hooks do not know how many tasks Spark runs at once
SHOWN = {"asof": "as_of", "keyrange": "key_range", "leases": "lease_s", "holdname": "hold_name"}


class Options:
    """See the header. `InvalidUsage` of kind `INVALID_MODE` for an option that cannot be used."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._texts: dict[str, str] = {}
        if OF_A_TABLE.issubset(map(str.lower, options)):
            raise invalid(LOST)
        for name, value in options.items():
            bare = name.replace("_", "").lower()
            if self._texts.setdefault(bare, value) != value:
                raise invalid(f"option {name} is given twice, as {value!r} and as {self._texts[bare]!r}")

    def check(self, allowed: set[str], purpose: str) -> None:
        """Refuse options that are not `allowed`."""
        unknown = sorted(self._texts.keys() - allowed - SPARKS_OWN)
        if unknown:
            shown = ", ".join(sorted(SHOWN.get(name, name) for name in allowed))
            raise invalid(f"unknown option {unknown[0]!r} {purpose}; the options are {shown}")

    @property
    def location(self) -> SparkLocation:
        """The location of the shards."""
        if self._texts.keys().isdisjoint({"location", "blob", "consensus"}):
            names = [f"AIOPERSIST_{name}" for name in ("LOCATION", "BLOB", "CONSENSUS")]
            if not any(map(os.environ.get, names)):
                raise invalid(f"no location: give option location, or set {names[0]}. {LOST}")
        location, blob, consensus = map(self._texts.get, ("location", "blob", "consensus"))
        return SparkLocation.of(location, blob, consensus)

    @property
    def shard(self) -> str:
        path = self._texts.get("path")
        if not path:
            raise invalid(f'no shard: name it by load("..."), save("...") or OPTIONS (path "..."). {LOST}')
        return path

    def text(self, name: str) -> str | None:
        return self._texts.get(name)

    def names(self, name: str) -> tuple[str, ...]:
        """Names of columns, separated by commas."""
        return tuple(part.strip() for part in self._texts.get(name, "").split(",") if part.strip())

    def time(self, name: str) -> int | tuple[int, ...] | datetime | None:
        """An integer, a JSON list of integers for product times, or an instant on a wall clock."""
        value = self._texts.get(name)
        if value is None or not value.lstrip().startswith("["):
            return self.instant(name)
        try:
            times = json.loads(value)
        except ValueError:
            times = [None]
        if not all(type(part) is int and part >= 0 for part in times):
            raise invalid(f"option {SHOWN.get(name, name)}={value!r} is not a JSON list of integers")
        return tuple(times)

    def instant(self, name: str) -> int | datetime | None:
        """An integer or an ISO timestamp; its offset is checked where it is used."""
        moment = instant(self._texts.get(name, ""))
        return self.integer(name) if moment is None else moment

    def integer(self, name: str, default: int | None = None, least: int = 0) -> int | None:
        value = self._texts.get(name)
        if value is None:
            return default
        try:
            number = int(value)
        except ValueError:
            number = least - 1
        if number < least:
            raise invalid(f"option {SHOWN.get(name, name)}={value!r} is not an integer of at least {least}")
        return number

    @property
    def tasks(self) -> int:
        """The number of tasks to plan, approximately."""
        return self.integer("parallelism", least=1) or TASKS

    def seconds(self, name: str, default: float) -> float:
        value = self._texts.get(name)
        try:
            number = default if value is None else float(value)
        except ValueError:
            number = 0.0
        if not 0 < number < float("inf"):
            raise invalid(f"option {SHOWN.get(name, name)}={value!r} is not a positive number of seconds")
        return number

    def flag(self, name: str, default: bool) -> bool:
        value = self._texts.get(name)
        if value is None:
            return default
        if value.lower() not in ("true", "false"):
            raise invalid(f"option {name}={value!r} is neither true nor false")
        return value.lower() == "true"

    def key_range(self) -> tuple[Any, Any] | None:
        """`[lower, upper]` as JSON, over the first column of the key; `null` for no bound."""
        value = self._texts.get("keyrange")
        if value is None:
            return None
        try:
            lower, upper = json.loads(value)
        except (ValueError, TypeError) as e:
            raise invalid(f'option key_range={value!r} is not a JSON list of two, like ["a", "m"]') from e
        return lower, upper

    def schema(self) -> "pa.Schema | None":
        """The columns of a new shard, from the text of `StructType.json()`."""
        from pyspark.sql.types import StructType

        value = self._texts.get("schema")
        if value is None:
            return None
        try:
            columns = StructType.fromJson(json.loads(value))
        except Exception as e:  # PySpark raises errors of many kinds
            raise invalid(f"option schema={value!r} is no text of StructType.json(): {e}") from e
        return arrow_schema(columns)

    def write_spec(self, *, overwrite: bool, streaming: bool = False) -> WriteSpec:
        """The write. A `time` that is a number is the time of all updates; otherwise it names a column."""
        apply = self._texts.get("apply", INSERT).lower()
        modes = {INSERT: APPEND, UPSERT: UPSERT, DELETE: DELETE}
        if apply not in modes:
            raise invalid(f"option apply={apply!r} is none of {', '.join(modes)}")
        if overwrite and apply != INSERT:
            raise invalid(f"apply={apply} works by keys of rows: use mode append")
        app, version = self._texts.get("txnappid"), self.integer("txnversion")
        if (app is None) is not (version is None) and not streaming:
            raise invalid("options txn_app_id and txn_version need each other")
        time = self._texts.get("time")
        return WriteSpec(
            shard=self.shard,
            mode=OVERWRITE if overwrite else modes[apply],
            keys=self.names("keys"),
            time=int(time) if time is not None and time.isdecimal() else time,
            diff=self._texts.get("diff"),
            txn=None if app is None or version is None else (app, version),
            schema=self.schema(),
        )


def instant(text: str) -> datetime | None:
    """The ISO timestamp in `text`; `None` for others, also for an integer, which may look like one."""
    with suppress(ValueError):
        return None if text.strip().isdecimal() else datetime.fromisoformat(text.strip())
    return None


def invalid(message: str) -> InvalidUsage:
    """The error for an option that cannot be used."""
    return InvalidUsage(UsageKind.INVALID_MODE, message)
