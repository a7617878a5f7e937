"""The spine: which neighbouring batches become one, and when. Metadata only, pure.

Batches lie in *levels*, older ones in higher levels; level `k` is for batches of at most `2**k` updates.
A level holds one spine batch, or two neighbours that are being merged. A spine batch is a range of
ordinals: the hollow batches that it is made of, until a compaction has replaced them by one.

A new batch of `n` updates enters level `ceil(log2(max(n, 1)))`:
1. It brings *fuel*, `FUEL << level`, for every merge that is under way. A merge of two spine batches needs
   as much as they have updates; then they are one, which enters the next level.
2. What is left in lower levels is newer than all above and older than the new batch: it is rolled up,
   level by level, into the level that the new batch enters.
3. The new batch enters, and a merge begins if another is there.
4. If the oldest batch has shrunk, by compaction, it moves down as long as that is worth a merge.

Why the counts stay logarithmic: levels double, and each holds two at most. Why a level has room when it is
needed: before a second batch can enter level `k` as many updates as it holds must come, with `FUEL` times
as much fuel as the merge in it needs. Why the work is O(n log n): each update is merged once per level.

Fuel is a counter that only rises, and a merge is *due* at a value of it: so an append changes one number,
and not every merge under way.

After differential dataflow's `spine_fueled.rs` (McSherry), which this follows in its shape and its argument.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from aiopersist.state.model import Level, SpineBatch, State

FUEL = 8  # times the updates inserted: four would do, more only begins compactions sooner


def level_of(length: int) -> int:
    """The level that a batch of so many updates enters."""
    return max(length - 1, 0).bit_length()


@dataclass
class Spine:
    """A working copy of the levels; `levels` and `fuel` are what the state keeps."""

    levels: dict[int, Level]
    fuel: int
    finished: list[SpineBatch] = field(default_factory=list)
    """What merges have made: each is to be compacted to one batch by somebody."""

    @classmethod
    def of(cls, levels: Mapping[int, Level], fuel: int) -> "Spine":
        return cls(dict(levels), fuel)

    def insert(self, ordinal: int, length: int) -> None:
        """The hollow batch of that ordinal, with `length` updates, is new and the newest of all."""
        level = level_of(length)
        self.fuel += FUEL << level
        for at in sorted(self.levels, reverse=True):  # from above, so that what is finished finds room
            due = self.levels[at].due
            if due is not None and due <= self.fuel:
                self._enter(at + 1, self._complete(at))
        self._roll_up(level)
        self._enter(level, SpineBatch.of(first=ordinal, last=ordinal, len=length))
        self._settle_down()

    def replace(self, first: int, last: int, before: int, after: int) -> None:
        """The hollow batches of the ordinals from `first` to `last`, with `before` updates, are one now,
        with ordinal `first` and `after` updates. The spine batches that they belong to become one."""
        touched = [at for at, level in self.levels.items() if _touches(level, first, last)]
        at = max(touched)
        whole = [batch for level in sorted(touched, reverse=True) for batch in self.levels.pop(level).batches]
        length = sum(batch.len for batch in whole) - before + after
        end = first if whole[-1].last == last else whole[-1].last
        merged = SpineBatch.of(first=whole[0].first, last=end, len=length)
        self._enter(at if length <= 1 << at else at + 1, merged)
        self._settle_down()

    def batches(self) -> Iterator[SpineBatch]:
        """All, oldest first."""
        for at in sorted(self.levels, reverse=True):
            yield from self.levels[at].batches

    # --- the steps -------------------------------------------------------------------------------

    def _enter(self, at: int, batch: SpineBatch) -> None:
        """`batch` is newer than all in this level and above."""
        found = self.levels.get(at)
        if found is not None and len(found.batches) == 2:  # fuel should have finished it
            self._enter(at + 1, self._complete(at))
            found = None
        if found is None:
            self.levels[at] = Level.of(batches=(batch,))
            return
        (older,) = found.batches
        self.levels[at] = Level.of(batches=(older, batch), due=self.fuel + older.len + batch.len)

    def _complete(self, at: int) -> SpineBatch:
        """Take what is in the level, as one."""
        found = self.levels.pop(at).batches
        if len(found) == 1:
            return found[0]
        older, newer = found
        merged = SpineBatch.of(first=older.first, last=newer.last, len=older.len + newer.len)
        self.finished.append(merged)
        return merged

    def _roll_up(self, level: int) -> None:
        """Nothing is left below `level`, and there is room in it."""
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
        """The oldest batch moves down to the level of its size, past vacant levels; and into a merge with
        the next one, if what lies below that is little enough to leave it the time."""
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
            self.levels[top - 1] = Level.of(batches=(older, newer), due=due)


def spine_of(state: State) -> Spine:
    """The spine of a state. One that was written before there were spines counts as one spine batch."""
    if state.levels or not state.batches:
        return Spine.of(state.levels, state.fuel)
    length = sum(batch.len for batch in state.batches.values())
    first, last = next(iter(state.batches)), next(reversed(state.batches))
    whole = SpineBatch.of(first=first, last=last, len=length)
    return Spine({level_of(length): Level.of(batches=(whole,))}, state.fuel)


def changed_levels(state: State, spine: Spine) -> dict[str, Any]:
    """What `commit` is to set for the spine to be this one."""
    levels = {at: level for at, level in spine.levels.items() if state.levels.get(at) is not level}
    return {"levels": levels, "fuel": spine.fuel}


def dropped_levels(state: State, spine: Spine) -> tuple[int, ...]:
    """What it is to drop."""
    return tuple(at for at in state.levels if at not in spine.levels)


def _touches(level: Level, first: int, last: int) -> bool:
    return any(batch.first <= last and first <= batch.last for batch in level.batches)


def is_contiguous(levels: Mapping[int, Level], ordinals: list[int]) -> bool:
    """Whether the spine's ranges are those of the ordinals, each once and in order, at most two a level."""
    found = list(Spine.of(levels, 0).batches())
    if not ordinals:
        return not found
    follow = dict(pairwise(ordinals))
    return (
        bool(found)
        and all(1 <= len(level.batches) <= 2 for level in levels.values())
        and found[0].first == ordinals[0]
        and found[-1].last == ordinals[-1]
        and all(b.first <= b.last for b in found)
        and all(follow.get(a.last) == b.first for a, b in pairwise(found))
    )
