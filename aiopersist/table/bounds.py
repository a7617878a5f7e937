"""How much a view may have in memory, and where it looks keys up, by the parts that the state names. Pure."""

from collections.abc import Iterable

from aiopersist.base.frontier import Antichain, last_before
from aiopersist.parts.fetch import Named
from aiopersist.state.model import State
from aiopersist.state.record import goodbytes_at_most
from aiopersist.table.held import ENTRY_BYTES

BASE_AGE_US = 600_000_000
RECENT_SHARE = 2  # recent changes may take one in so many bytes of the memory
RETURN_SHARE = 2  # a view becomes resident again below one in so many bytes of what it may have


def size_of(named: Iterable[Named]) -> float:
    """The goodbytes of parts, at most."""
    return sum(goodbytes_at_most(part) for _, part in named)


def contents_at_most(state: State) -> float:
    """About the bytes in memory of the contents of a state, at most, unless values have many small fields."""
    parts = [part for batch in state.batches.values() for part in batch.parts]
    return sum(goodbytes_at_most(part) + ENTRY_BYTES * part.rows for part in parts)


def may_fit(state: State, bytes_max: int) -> bool:
    """Whether it is worth a try to read the contents into so much memory."""
    encoded = sum(part.size for batch in state.batches.values() for part in batch.parts)
    return encoded <= bytes_max or contents_at_most(state) <= bytes_max


def surely_fits(state: State, bytes_max: float) -> bool:
    """Whether the contents are well below so much memory."""
    return contents_at_most(state) <= bytes_max / RETURN_SHARE


def is_too_large(named: Iterable[Named], bytes_max: int, *, resident: bool) -> bool:
    """Whether new parts are too large to be read by a view."""
    return size_of(named) > (bytes_max if resident else bytes_max / RECENT_SHARE)


def next_base(
    state: State, base: Antichain, upper: Antichain, recent_bytes: int, bytes_max: int
) -> Antichain:
    """Where to look keys up from now on. Behind the batches that have something before `base`: a look-up
    reads their parts in any case. At `upper`, if recent changes take much memory, or if `base` is old: then
    since would be held back for long."""
    is_old = last_before(upper) - last_before(base) > BASE_AGE_US
    if is_old or recent_bytes > bytes_max / RECENT_SHARE:
        return upper
    for batch in state.batches.values():
        if batch.parts and not base <= batch.lower:
            base = base.join(batch.upper)
    return base.meet(upper)
