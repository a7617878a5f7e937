"""Hypothesis strategies for times, frontiers, updates and histories of a shard.

The ranges are small on purpose: bugs lie where keys, times and frontiers collide.
"""

from typing import Any

from hypothesis import strategies as st

from aiopersist.base.frontier import Antichain

KEYS = ("", "a", "b", "ba", "é", "\x00")


def times(length: int | None = None, *, top: int = 4) -> st.SearchStrategy[Any]:
    """Ints in `[0, top]`; with a `length`, product times of such ints."""
    component = st.integers(0, top)
    return component if length is None else st.tuples(*[component] * length)


def frontiers(
    length: int | None = None, *, top: int = 4, elements_max: int = 3, empty: bool = True
) -> st.SearchStrategy[Antichain]:
    """Antichains of `times`; with `empty`, the empty one too."""
    elements = st.lists(times(length, top=top), min_size=0 if empty else 1, max_size=elements_max)
    return elements.map(lambda times: Antichain(*times))


def updates(length: int | None = None, *, top: int = 4, keys: Any = KEYS) -> st.SearchStrategy[Any]:
    """Updates `(key, val, time, diff)` with few keys and values, so that they often meet and cancel out."""
    diffs = st.integers(-2, 3).filter(bool)
    return st.tuples(st.sampled_from(keys), st.integers(0, 1), times(length, top=top), diffs)


@st.composite
def histories(draw: Any, length: int | None = None, *, top: int = 4, appends_max: int = 5) -> Any:
    """A list of appends `(updates, lower, upper)`, each with updates within its bounds; each begins where the
    one before ends, and the first at the minimum."""
    lower = Antichain(0 if length is None else (0,) * length)
    appends = []
    for _ in range(draw(st.integers(1, appends_max))):
        upper = lower.join(draw(frontiers(length, top=top + 1, empty=False)))
        rows = draw(st.lists(updates(length, top=top), max_size=8))
        held = [row for row in rows if lower.less_equal(row[2]) and not upper.less_equal(row[2])]
        appends.append((held, lower, upper))
        lower = upper
    return appends
