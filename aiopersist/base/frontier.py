"""Times, frontiers and descriptions: the partial order behind everything else.

A time is an `int` in `[0, 2**63)` or a product time, a tuple of such ints of one fixed length, ordered
component by component. A *frontier* is an antichain: a set of times, none less than another. It stands for
all times at or beyond one of its elements. So the empty frontier stands for no time: it is the greatest, the
final frontier.

Definitions follow Timely Dataflow's `Antichain` (Murray et al., "Naiad", SOSP 2013) and the
compaction function of differential dataflow ("advance_by", McSherry et al.).
"""

from collections.abc import Iterable
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, final

from aiopersist.base.errors import InvalidUsage, UsageKind, shown

Time = int | tuple[int, ...]
TIME_MAX = 2**63 - 1  # times are stored as signed INT64
RECENT = 1024  # recently read frontiers that are kept


def check_time(time: object) -> Time:
    """`time` itself if it is a time; else `InvalidUsage` of kind `INVALID_TIME`."""
    if type(time) is int:
        if 0 <= time <= TIME_MAX:
            return time
    elif isinstance(time, tuple) and time and all(type(t) is int and 0 <= t <= TIME_MAX for t in time):
        return time
    elif isinstance(time, int) and not isinstance(time, bool):  # an IntEnum, say
        return check_time(int(time))
    raise InvalidUsage(
        UsageKind.INVALID_TIME,
        f"{shown(time)} is not a time: an int in [0, 2**63) or a tuple of them",
        time=time,
    )


def less_equal(a: Time, b: Time) -> bool:
    """Whether `a <= b` in the partial order; `a` and `b` have the same shape."""
    if isinstance(a, int):
        return a <= b  # type: ignore[operator]  # same shape
    return all(x <= y for x, y in zip(a, b, strict=True))  # type: ignore[arg-type]  # same shape


def join(a: Time, b: Time) -> Time:
    """The least time at or beyond both."""
    if isinstance(a, int):
        return max(a, b)
    return tuple(map(max, a, b))  # type: ignore[arg-type]  # same shape


def meet(a: Time, b: Time) -> Time:
    """The greatest time at or before both."""
    if isinstance(a, int):
        return min(a, b)
    return tuple(map(min, a, b))  # type: ignore[arg-type]  # same shape


@final
class Antichain:
    """A frontier: immutable, hashable, minimal elements only, sorted. `Antichain()` is empty.

    `<`, `<=`, `>`, `>=` compare frontiers, and a frontier with a time, which counts as the frontier of that
    time: `reader.upper > 5`. Equality is only for frontiers: write `upper.time == 5`."""

    __slots__ = ("elements",)
    elements: tuple[Time, ...]
    """Its times, sorted, none less than another; `()` for the empty frontier."""

    def __init__(self, *elements: Time) -> None:
        if len(elements) != 1:
            elements = _minimal(elements)
        elif type(time := elements[0]) is not int or not 0 <= time <= TIME_MAX:
            elements = (check_time(time),)
        object.__setattr__(self, "elements", elements)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Antichain is immutable: cannot set {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"Antichain is immutable: cannot delete {name!r}")

    @property
    def time(self) -> Time | None:
        """The only element; `None` when empty; `ValueError` when there are several."""
        if len(self.elements) > 1:
            raise ValueError(f"{self} has several elements")
        return self.elements[0] if self.elements else None

    def less_equal(self, time: Time) -> bool:
        """Whether `time` is at or beyond an element: the frontier has not passed it."""
        if type(time) is int and len(self.elements) == 1 and type(self.elements[0]) is int:
            return self.elements[0] <= time  # a shortcut for most calls
        return any(less_equal(e, _same_shape(self, time)) for e in self.elements)

    def less_than(self, time: Time) -> bool:
        """Whether `time` is strictly beyond an element."""
        return any(e != time and less_equal(e, _same_shape(self, time)) for e in self.elements)

    def __le__(self, other: "Antichain | Time") -> bool:
        that = other if type(other) is Antichain else _comparable(other)
        if that is None:
            return NotImplemented
        if len(that.elements) == 1:  # most frontiers have one element
            return self.less_equal(that.elements[0])
        return all(self.less_equal(t) for t in that.elements)

    def __lt__(self, other: "Antichain | Time") -> bool:
        that = _comparable(other)
        return NotImplemented if that is None else self.elements != that.elements and self.__le__(that)

    def __ge__(self, other: "Antichain | Time") -> bool:
        that = _comparable(other)
        return NotImplemented if that is None else that.__le__(self)

    def __gt__(self, other: "Antichain | Time") -> bool:
        that = _comparable(other)
        return NotImplemented if that is None else that.__lt__(self)

    def join(self, other: "Antichain | Time") -> "Antichain":
        """The least frontier at or beyond both: the times beyond one *and* the other."""
        other = frontier(other)
        _same_length(self, other)
        return Antichain(*(join(a, b) for a in self.elements for b in other.elements))

    def meet(self, other: "Antichain | Time") -> "Antichain":
        """The greatest frontier at or before both: the times beyond one *or* the other."""
        return Antichain(*self.elements, *frontier(other).elements)

    def __eq__(self, other: object) -> bool:
        return type(other) is Antichain and self.elements == other.elements

    def __hash__(self) -> int:
        return hash(self.elements)

    def __repr__(self) -> str:
        return "{" + ", ".join(map(repr, self.elements)) + "}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Antichain, self.elements

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: object) -> Any:
        """In JSON a frontier is the list of its elements: `[3]`, `[[0,11],[10,1]]`, `[]`."""
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            antichain_of,
            serialization=core_schema.plain_serializer_function_ser_schema(attrgetter("elements")),
        )


def _comparable(value: object) -> Antichain | None:
    """`value` as a frontier; `None` if it is neither a frontier nor a time."""
    if isinstance(value, Antichain):
        return value
    is_time = isinstance(value, int | tuple) and not isinstance(value, bool)
    return Antichain(value) if is_time else None  # type: ignore[arg-type]  # checked there


def successor(time: Time) -> Antichain:
    """The least frontier that has passed `time`, an int: `{}` after the greatest."""
    assert isinstance(time, int)
    return _of_int(time + 1) if time < TIME_MAX else Antichain()


def predecessor(frontier: Antichain) -> Antichain:
    """The component-wise predecessors of the elements of `frontier`, at least the minimum. Among the times
    before `frontier` there is one at or beyond the result: for ints the last one."""
    elements = frontier.elements
    if len(elements) == 1 and type(time := elements[0]) is int:  # a shortcut for most frontiers
        return _of_int(max(time - 1, 0))
    return Antichain(
        *(max(e - 1, 0) if isinstance(e, int) else tuple(max(c - 1, 0) for c in e) for e in elements)
    )


def int_time(frontier: Antichain) -> int | None:
    """The time of a frontier of int times; `None` for the empty one."""
    time = frontier.time
    assert not isinstance(time, tuple)
    return time


def last_before(upper: Antichain) -> int:
    """The greatest int time before `upper`; -1 at the minimum."""
    time = int_time(upper)
    return TIME_MAX if time is None else time - 1


def frontier(value: "Antichain | Time") -> Antichain:
    """`value` as a frontier: a time stands for the frontier of that time."""
    return value if isinstance(value, Antichain) else Antichain(value)


def minimum(time_length: int | None) -> Antichain:
    """The least frontier: `{0}`, or `{(0, 0)}` for product times of length 2. `None`: int times."""
    return _of_int(0) if time_length is None else Antichain((0,) * time_length)


def shaped(value: "Antichain | Time", time_length: int | None) -> Antichain:
    """`value` as a frontier of times of that length (`None`: ints); `INVALID_TIME` for another shape."""
    if time_length is None and type(value) is int:  # most calls
        return _of_int(value)
    result = frontier(value)
    if result.elements:
        minimum(time_length).less_equal(result.elements[0])  # raises for another shape
    return result


def advance(time: Time, frontier: Antichain | Time) -> Time:
    """The time that may replace `time` if all later reads are at times beyond `frontier`: the meet of
    `join(time, f)` over all `f` in the frontier; for ints `max(time, f)`.

    The frontier must not be empty: there would be no time to advance to.
    """
    target = frontier if isinstance(frontier, Antichain) else Antichain(frontier)
    if not target.elements:
        raise InvalidUsage(UsageKind.INVALID_TIME, "cannot advance to the empty frontier {}", time=time)
    _same_shape(target, check_time(time))
    joined = [join(time, f) for f in target.elements]
    result = joined[0]
    for other in joined[1:]:
        result = meet(result, other)
    return result


class _DescriptionFields(NamedTuple):
    lower: Antichain
    upper: Antichain
    since: Antichain


class Description(_DescriptionFields):
    """The description of a batch: it has the updates at times beyond `lower` and not beyond `upper`, correct
    for readers at times beyond `since`."""

    __slots__ = ()

    def __new__(
        cls, lower: Antichain | Time, upper: Antichain | Time, since: Antichain | Time
    ) -> "Description":
        return super().__new__(cls, frontier(lower), frontier(upper), frontier(since))


def _minimal(times: Iterable[Time]) -> tuple[Time, ...]:
    unique = sorted({check_time(t) for t in times}, key=lambda t: t if isinstance(t, tuple) else (t,))
    shapes = {len(t) if isinstance(t, tuple) else 0 for t in unique}
    if len(shapes) > 1:
        raise InvalidUsage(UsageKind.INVALID_TIME, f"times of different lengths: {unique}", time=unique)
    return tuple(t for t in unique if not any(u != t and less_equal(u, t) for u in unique))


def _same_shape(frontier: Antichain, time: Time) -> Time:
    first = frontier.elements[0]
    if isinstance(first, int) is isinstance(time, int) and (
        isinstance(first, int) or len(first) == len(time)  # type: ignore[arg-type]  # both tuples
    ):
        return time
    raise InvalidUsage(UsageKind.INVALID_TIME, f"time {time!r} is not of the shape of {frontier}", time=time)


def _same_length(a: Antichain, b: Antichain) -> None:
    if a.elements and b.elements:
        _same_shape(a, b.elements[0])


@lru_cache(RECENT)
def _of_int(time: int) -> Antichain:
    """Cached: a state has each time several times, and so does its next version."""
    return Antichain(time)


def antichain_of(value: Any) -> Antichain:
    """The frontier of a list of times, its JSON form; `ValueError` for anything else."""
    if type(value) is Antichain:
        return value
    try:
        if type(value) is list and len(value) == 1 and type(value[0]) is int:  # a shortcut for most frontiers
            return _of_int(value[0])
        return Antichain(*(tuple(e) if isinstance(e, list) else e for e in value))
    except (InvalidUsage, TypeError) as e:  # pydantic turns it into a ValidationError that names the field
        raise ValueError(str(e)) from e
