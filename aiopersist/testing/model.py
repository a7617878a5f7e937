"""An oracle for shards: a list of updates, and definitions as one would write them on a blackboard.

It shares no helper with the library, on purpose, and knows nothing of batches, parts, runs or states.
Times are ints or tuples; a frontier is any iterable of times, so an `Antichain`'s `elements` will do.

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
    """Something that compares as the library orders values of Python: nothing first, NaN last, structs
    field by field, lists element by element."""
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
    """Rows of equal key and val as one, none with a diff of 0, in key order."""
    sums: Counter[Any] = Counter()
    named: dict[Any, tuple[Any, Any]] = {}
    for key, val, diff in rows:
        identity = (comparable(key), comparable(val))
        named.setdefault(identity, (key, val))
        sums[identity] += diff
    return [(*named[identity], sums[identity]) for identity in sorted(named) if sums[identity]]


class Model:
    """All updates that a shard was ever given, and its upper."""

    def __init__(self, upper: Iterable[Any] = (0,)) -> None:
        self.updates: list[Update] = []
        self.upper: tuple[Any, ...] = tuple(upper)

    def append(self, updates: Iterable[Update], lower: Iterable[Any], upper: Iterable[Any]) -> None:
        """What a successful append leaves: its updates, each in `[lower, upper)`."""
        bounds = tuple(lower), tuple(upper)
        assert bounds[0] == self.upper, (bounds, self.upper)
        for update in updates:
            assert not passed(bounds[0], update[2]) and passed(bounds[1], update[2]), update
            self.updates.append(update)
        self.upper = bounds[1]

    def complete(self, time: Any) -> bool:
        """Whether contents at `time` are known for good."""
        return passed(self.upper, time)

    def contents(self, as_of: Any) -> list[Row]:
        """The sums of all updates at or before `as_of`, in key order."""
        return summed((k, v, d) for k, v, t, d in self.updates if before_or_at(t, as_of))

    def changes(
        self,
        as_of: Any = None,
        *,
        lower: Iterable[Any] | None = None,
        upper: Iterable[Any] | None = None,
    ) -> Counter[tuple[Any, Any, Any]]:
        """What a listen from `as_of` (`None`: from the minimum) delivers in `[lower, upper)`: the sum of
        diffs by (key, val, time), none that is 0. Product times are advanced to `as_of`."""
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
    """The same sums without those that are 0."""
    return Counter({what: diff for what, diff in sums.items() if diff})


def gathered(
    updates: Iterable[Iterable[Any]], where: Callable[[Any], bool] = lambda time: True
) -> Counter[Any]:
    """The sum of diffs of `updates` by (key, val, time), none that is 0."""
    sums: Counter[Any] = Counter()
    for key, val, time, diff in updates:
        if where(time):
            sums[key, val, time] += diff
    return without_zeros(sums)
