"""The checks of a call that need no I/O: frontiers, bounds, transactions."""

from typing import Any

from aiopersist.data.types.schema import Schema
from aiopersist.errors import InvalidUsage, UsageKind
from aiopersist.frontier import Antichain, Time, shaped
from aiopersist.shard.catalog import is_text

Txn = tuple[str, int]


def check_frontier(value: Antichain | Time, schema: Schema[Any, Any, Any]) -> Antichain:
    """`value` as a frontier of the schema's times; `INVALID_TIME` for another shape."""
    return shaped(value, schema.time_length)


def check_bounds(
    lower: Antichain | Time, upper: Antichain | Time, schema: Schema[Any, Any, Any]
) -> tuple[Antichain, Antichain]:
    """Both as frontiers; `INVALID_BOUNDS` unless `lower <= upper`."""
    bounds = check_frontier(lower, schema), check_frontier(upper, schema)
    if not bounds[0] <= bounds[1]:
        message = f"upper {bounds[1]} is not at or beyond lower {bounds[0]}"
        raise InvalidUsage(UsageKind.INVALID_BOUNDS, message, lower=bounds[0], upper=bounds[1])
    return bounds


def check_txn(txn: Txn | None) -> dict[str, int]:
    """`txn` as a mapping; `InvalidUsage` of kind `INVALID_TXN` if it is no `(app_id, number)`."""
    if txn is None:
        return {}
    if isinstance(txn, tuple) and len(txn) == 2:
        app, number = txn
        if is_text(app) and type(number) is int and 0 <= number < 2**63:
            return {app: number}
    text = f"{txn!r} is not (app_id, number): text and an int in [0, 2**63)"
    raise InvalidUsage(UsageKind.INVALID_TXN, text, txn=txn)
