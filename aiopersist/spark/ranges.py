"""How a read is divided: key ranges that hold about as many updates each, as far as statistics tell.

What is known are *blocks*, row groups as a rule: the least and the greatest key in each, and how many
updates. Blocks of several runs overlap, so a task reads its range of every run and sums it. Cuts are made at
lower bounds of blocks: there most of a run can be passed over.

*Skew.* A key that fills blocks cannot be cut. Its range is divided by a hash of key and val instead: each of
its tasks reads all of it, and sums and hands on a share.
"""

from collections.abc import Iterable, Sequence
from functools import cmp_to_key
from typing import Any, NamedTuple


class Block(NamedTuple):
    """Updates of some part whose keys lie in `[lower, upper]`. A bound that is not known is `None`."""

    lower: Any
    upper: Any
    updates: int


class KeyRange(NamedTuple):
    """Keys in `[lower, upper)`; `None`: without a bound there, and with what has no bounds (nulls). Of those
    the share `share` of `shares`, by hash."""

    lower: Any = None
    upper: Any = None
    share: int = 0
    shares: int = 1


def divide(blocks: Iterable[Block], tasks: int) -> list[KeyRange]:
    """About as many pieces as `tasks`, at most twice: disjoint ranges in order, which cover all keys, or
    shares of them. Blocks without bounds are in all of them as far as is known, so they do not count."""
    known = [block for block in blocks if block.lower is not None and block.upper is not None]
    total = sum(block.updates for block in known)
    if tasks <= 1 or not total:
        return [KeyRange()]
    cuts = _cuts(sorted(known, key=lambda block: _order(block.lower)), total / tasks)
    ranges = [KeyRange(a, b) for a, b in zip([None, *cuts], [*cuts, None], strict=True)]
    return [piece for each in ranges for piece in _shared(each, known, total / tasks)]


def _cuts(blocks: Sequence[Block], goal: float) -> list[Any]:
    """Lower bounds at which about `goal` updates have come since the last."""
    cuts: list[Any] = []
    held = 0.0
    for block in blocks:
        is_new = block.lower != (cuts[-1] if cuts else blocks[0].lower)
        if held >= goal and is_new:
            cuts.append(block.lower)
            held = 0.0
        held += block.updates
    return cuts


def _shared(whole: KeyRange, blocks: Sequence[Block], goal: float) -> list[KeyRange]:
    """The range itself; or shares of it, where it holds one key alone, very often."""
    within = [block for block in blocks if _begins_in(block, whole)]
    hot = [block for block in within if block.lower == block.upper]
    updates = sum(block.updates for block in hot)
    shares = int(updates // goal) if len({repr(block.lower) for block in hot}) == 1 else 1
    if shares <= 1:
        return [whole]
    return [whole._replace(share=share, shares=shares) for share in range(shares)]


def _begins_in(block: Block, keys: KeyRange) -> bool:
    after = keys.lower is None or not _less(block.lower, keys.lower)
    return after and (keys.upper is None or _less(block.lower, keys.upper))


def _less(a: Any, b: Any) -> bool:
    less: bool = a < b
    return less


_order = cmp_to_key(lambda a, b: -1 if _less(a, b) else int(_less(b, a)))
