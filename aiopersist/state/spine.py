"""The spine: which neighbouring batches become one, and when. Pure; metadata only.

Batches lie in *levels*, older batches in higher levels; level `k` is for batches of at most `2**k` updates. A
level holds one spine batch, or two neighbours that are being merged. A spine batch is a range of ordinals:
hollow batches that count as one, until a compaction replaces them by one.

A new batch of `n` updates enters level `ceil(log2(max(n, 1)))`:
1. It brings *fuel*, `FUEL << level`, to every merge under way. A merge of two spine batches needs
   as much fuel as they have updates; then they become one, which enters the next level.
2. The batches in lower levels are newer than all above and older than the new batch: they are rolled up,
   level by level, into the level that the new batch enters.
3. The new batch enters; if the level has a batch already, a merge of the two begins.
4. If compaction has shrunk the oldest batch, it moves down as long as that is worth a merge.

The number of batches is logarithmic: the sizes of levels double, and each level holds two batches at most. A
level has room when a batch enters: before a second batch can enter level `k`, as many updates as the level
holds must come, with `FUEL` times as much fuel as its merge needs. The work is O(n log n): each update is
merged once per level.

Fuel is a counter that only rises, and each merge is *due* at a value of it. So an append changes one number.

The structure and the argument are those of differential dataflow's `spine_fueled.rs` (McSherry).
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

from msgspec import Struct

from aiopersist.state.model import Level, SpineBatch, State

FUEL = 8  # per inserted update: four would do, more only begins compactions sooner


def level_of(length: int) -> int:
    """The level that a batch of so many updates enters."""
    return max(length - 1, 0).bit_length()


class Spine(Struct, eq=False):
    """A working copy of the levels; `levels` and `fuel` are what the state keeps."""

    levels: dict[int, Level]
    fuel: int
    finished: list[SpineBatch] = []
    """The results of merges: each must be compacted to one batch."""

    def insert(self, ordinal: int, length: int) -> None:
        """Insert the newest hollow batch, of that ordinal, with `length` updates."""
        level = level_of(length)
        self.fuel += FUEL << level
        for at in sorted(self.levels, reverse=True):  # from above: the result of a merge finds room
            due = self.levels[at].due
            if due is not None and due <= self.fuel:
                self._enter(at + 1, self._complete(at))
        self._roll_up(level)
        self._enter(level, SpineBatch(first=ordinal, last=ordinal, len=length))
        self._settle_down()

    def replace(self, first: int, last: int, before: int, after: int) -> None:
        """Replace the hollow batches from ordinal `first` to `last`, with `before` updates, by one of ordinal
        `first` with `after` updates. Their spine batches become one, too."""
        touched = [at for at, level in self.levels.items() if _touches(level, first, last)]
        at = max(touched)
        whole = [batch for level in sorted(touched, reverse=True) for batch in self.levels.pop(level).batches]
        length = sum(batch.len for batch in whole) - before + after
        end = first if whole[-1].last == last else whole[-1].last
        merged = SpineBatch(first=whole[0].first, last=end, len=length)
        self._enter(at if length <= 1 << at else at + 1, merged)
        self._settle_down()

    def batches(self) -> Iterator[SpineBatch]:
        """All spine batches, oldest first."""
        for at in sorted(self.levels, reverse=True):
            yield from self.levels[at].batches

    # --- the steps -------------------------------------------------------------------------------

    def _enter(self, at: int, batch: SpineBatch) -> None:
        """Put `batch`, which is newer than all batches in this level and above, into the level."""
        level = self.levels.get(at)
        if level is not None and len(level.batches) == 2:  # fuel should have finished the merge
            self._enter(at + 1, self._complete(at))
            level = None
        if level is None:
            self.levels[at] = Level(batches=(batch,))
            return
        (older,) = level.batches
        self.levels[at] = Level(batches=(older, batch), due=self.fuel + older.len + batch.len)

    def _complete(self, at: int) -> SpineBatch:
        """Take the batches out of the level, as one."""
        batches = self.levels.pop(at).batches
        if len(batches) == 1:
            return batches[0]
        older, newer = batches
        merged = SpineBatch(first=older.first, last=newer.last, len=older.len + newer.len)
        self.finished.append(merged)
        return merged

    def _roll_up(self, level: int) -> None:
        """Empty the levels below `level`, and make room in it."""
        below = [at for at in sorted(self.levels) if at < level]
        if below:
            carried: SpineBatch | None = None
            for at in range(below[0], level):
                if carried is not None:
                    self._enter(at, carried)
                carried = self._complete(at) if at in self.levels else None
            if carried is not None:
                self._enter(level, carried)
        if level in self.levels and len(self.levels[level].batches) == 2:
            self._enter(level + 1, self._complete(level))

    def _settle_down(self) -> None:
        """Move the oldest batch down to the level of its size, past vacant levels; and into a merge with
        the next batch, if the levels below have so few updates that the merge has time to finish."""
        while self.levels:
            top = max(self.levels)
            if len(self.levels[top].batches) == 2 or level_of(self.levels[top].batches[0].len) >= top:
                return
            below = self.levels.get(top - 1)
            if below is None:
                self.levels[top - 1] = self.levels.pop(top)
                continue
            smaller = sum(len(self.levels[at].batches) << at for at in self.levels if at < top - 1)
            if len(below.batches) == 2 or smaller > (1 << top) // 8:
                return
            (older,), (newer,) = self.levels.pop(top).batches, below.batches
            due = self.fuel + older.len + newer.len
            self.levels[top - 1] = Level(batches=(older, newer), due=due)


def spine_of(state: State) -> Spine:
    """The spine of `state`. In states from before there were spines, all batches count as one."""
    if state.levels or not state.batches:
        return Spine(dict(state.levels), state.fuel)
    length = sum(batch.len for batch in state.batches.values())
    first, last = next(iter(state.batches)), next(reversed(state.batches))
    whole = SpineBatch(first=first, last=last, len=length)
    return Spine({level_of(length): Level(batches=(whole,))}, state.fuel)


def changed_levels(state: State, spine: Spine) -> dict[str, Any]:
    """The changes that make the state's spine `spine`; see also `dropped_levels`."""
    levels = {at: level for at, level in spine.levels.items() if state.levels.get(at) is not level}
    return {"levels": levels, "fuel": spine.fuel}


def dropped_levels(state: State, spine: Spine) -> tuple[int, ...]:
    """The levels to drop with `changed_levels`."""
    return tuple([at for at in state.levels if at not in spine.levels])


def _touches(level: Level, first: int, last: int) -> bool:
    return any(batch.first <= last and first <= batch.last for batch in level.batches)


def is_contiguous(levels: Mapping[int, Level], ordinals: list[int]) -> bool:
    """Whether the spine batches cover the ordinals, each once and in order, at most two in a level."""
    batches = list(Spine(dict(levels), 0).batches())
    if not ordinals:
        return not batches
    follow = dict(pairwise(ordinals))
    return (
        bool(batches)
        and all(1 <= len(level.batches) <= 2 for level in levels.values())
        and batches[0].first == ordinals[0]
        and batches[-1].last == ordinals[-1]
        and all(b.first <= b.last for b in batches)
        and all(follow.get(a.last) == b.first for a, b in pairwise(batches))
    )
