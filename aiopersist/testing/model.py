"""An oracle for shards: a list of updates, and definitions as on a blackboard.

It shares no helper with the library, on purpose, and has no batches, parts, runs or states. Times are ints or
tuples; a frontier is any iterable of times, such as the `elements` of an `Antichain`.

    model = Model()
    model.append([("a", 1, 0, 1)], [0], [5])
    assert await snapshot.rows() == model.contents(4)
"""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

Update = tuple[Any, Any, Any, int]
Row = tuple[Any, Any, int]


def before_or_at(a: Any, b: Any) -> bool:
    """`a <= b` in the partial order of times."""
    if isinstance(a, tuple):
        return all(a[i] <= b[i] for i in range(len(a)))
    return bool(a <= b)


def passed(frontier: Iterable[Any], time: Any) -> bool:
    """Whether the frontier has passed `time`: no element is at or before it."""
    return not any(before_or_at(element, time) for element in frontier)


def later_of(a: Any, b: Any) -> Any:
    """The least time at or after both."""
    return tuple(max(a[i], b[i]) for i in range(len(a))) if isinstance(a, tuple) else max(a, b)


def comparable(value: Any) -> Any:
    """A tuple that compares as the library orders values of Python: `None` first, NaN last, structs field by
    field, lists element by element."""
    if value is None:
        return ()
    if isinstance(value, float):
        return (value != value, 0.0 if value != value else value)
    if hasattr(value, "model_dump"):
        return comparable(value.model_dump())
    if isinstance(value, dict):
        return (tuple(comparable(v) for v in value.values()),)
    if isinstance(value, list | tuple):
        return (tuple(comparable(v) for v in value),)
    return (value,)


def summed(rows: Iterable[Row]) -> list[Row]:
    """Sum the rows of equal key and value into one row, in key order, without those of diff 0."""
    sums: Counter[Any] = Counter()
    named: dict[Any, tuple[Any, Any]] = {}
    for key, val, diff in rows:
        identity = (comparable(key), comparable(val))
        named.setdefault(identity, (key, val))
        sums[identity] += diff
    return [(*named[identity], sums[identity]) for identity in sorted(named) if sums[identity]]


class Model:
    """All updates that were ever appended to a shard, and its upper."""

    def __init__(self, upper: Iterable[Any] = (0,)) -> None:
        self.updates: list[Update] = []
        self.upper: tuple[Any, ...] = tuple(upper)

    def append(self, updates: Iterable[Update], lower: Iterable[Any], upper: Iterable[Any]) -> None:
        """Record a successful append, whose updates all lie in `[lower, upper)`."""
        bounds = tuple(lower), tuple(upper)
        assert bounds[0] == self.upper, (bounds, self.upper)
        for update in updates:
            assert not passed(bounds[0], update[2]) and passed(bounds[1], update[2]), update
            self.updates.append(update)
        self.upper = bounds[1]

    def complete(self, time: Any) -> bool:
        """Whether the contents at `time` are final."""
        return passed(self.upper, time)

    def contents(self, as_of: Any) -> list[Row]:
        """The sums of all updates at or before `as_of`, in key order."""
        return summed((k, v, d) for k, v, t, d in self.updates if before_or_at(t, as_of))

    def changes(
        self, as_of: Any = None, *, lower: Iterable[Any] | None = None, upper: Iterable[Any] | None = None
    ) -> Counter[tuple[Any, Any, Any]]:
        """The updates that a listen from `as_of` (`None`: from the minimum) delivers in `[lower, upper)`:
        sums of diffs by (key, value, time), without zeros. Product times are advanced to `as_of`."""
        sums: Counter[tuple[Any, Any, Any]] = Counter()
        begin = None if lower is None else tuple(lower)
        end = None if upper is None else tuple(upper)
        for key, val, time, diff in self.updates:
            if as_of is not None and before_or_at(time, as_of):
                continue
            at = later_of(time, as_of) if isinstance(time, tuple) and as_of is not None else time
            if (begin is None or not passed(begin, at)) and (end is None or passed(end, at)):
                sums[key, val, at] += diff
        return without_zeros(sums)


def without_zeros(sums: Counter[Any]) -> Counter[Any]:
    """The sums that are not 0."""
    return Counter({what: diff for what, diff in sums.items() if diff})


def gathered(
    updates: Iterable[Iterable[Any]], where: Callable[[Any], bool] = lambda time: True
) -> Counter[Any]:
    """The sums of diffs of `updates` by (key, value, time), without zeros."""
    sums: Counter[Any] = Counter()
    for key, val, time, diff in updates:
        if where(time):
            sums[key, val, time] += diff
    return without_zeros(sums)
