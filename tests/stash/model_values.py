"""The types that collections of the game have, and the values they are tried with."""

import datetime as dt
import uuid
from decimal import Decimal
from typing import Any

import aiopersist as ap
from tests.data import data_oracle as oracle
from tests.stash.stash_model import EMPTY, MAX, MIN, Kind
from tests.support.schemas import NAN

_some = {"amount": Decimal("1.5"), "at": dt.datetime(2020, 1, 1, tzinfo=dt.UTC), "day": dt.date(2020, 1, 1)}
_vals = [
    oracle.Val(**_some, color=oracle.Color.RED),
    oracle.Val(**_some, color=oracle.Color.BLUE, scores=[None, NAN], ref=uuid.UUID(int=1)),
    oracle.Val(**_some, color=oracle.Color.BLUE, inners=[None, oracle.Inner(text="é", score=-0.0)]),
]
_keys = [
    oracle.Key(name="", number=None),
    oracle.Key(name="", number=-(2**63), inner=oracle.Inner(text="")),
    oracle.Key(name="\uffff", number=1, inner=oracle.Inner(text="a", score=NAN)),
    oracle.Key(name="\U00010000", number=1),
]
_texts = ["", "a", "\uffff", "\U00010000", "it's \\ \"", "a\x00b"]
_floats = [0.0, -1.5, float("inf"), float("-inf"), 5e-324, NAN]
KINDS = {
    "str-int": Kind(str, int, _texts, [0, 1, -1, MAX, MIN], [None, 1, b"a", "\ud800"], [None, "a", 2**63]),
    "models": Kind(oracle.Key, oracle.Val, _keys, _vals, [None, "a", _vals[0]], [None, _keys[0]]),
    "bytes-floats": Kind(
        *(bytes, list[float | None], [b"", b"\x00", b"\xff", b"a" * 300]),
        *([[], [NAN], [None, 1.5], [float("inf")]], ["a", None], [["a"], 1.5, None]),
    ),
    "optional-str": Kind(int | None, str, [None, 0, -1, MAX], _texts, ["a", 2**63], [None, 1, "\ud800"]),
    "float-optional": Kind(
        float, int | None, _floats, [None, 0, -1], ["a", None], ["a", 2**63], nullable=True
    ),
    "float-str": Kind(float, str, _floats, ["a", "b"], ["a", None], [None, 1]),
}
NAMES = [f"c{number}" for number in range(12)]
TABLES = set(NAMES[::2])  # mostly with one val per key


def canonical(value: Any) -> Any:
    try:
        return oracle.canonical(value)
    except UnicodeEncodeError:  # no text
        return repr(value)


def told(value: Any) -> Any:
    """What a call returned, comparable."""
    return canonical(list(value.items()) if isinstance(value, dict) else value)


def frontier(time: float) -> ap.Antichain:
    return ap.Antichain() if time == EMPTY else ap.Antichain(int(time))
