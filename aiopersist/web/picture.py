"""The picture of a shard as a value: the places of boxes, marks and ticks. Pure; a template draws it.

Time runs to the right. A batch is a box: its width is its interval, its height the logarithm of its rows. It
lies in the lane of its level in the spine, so the newest and smallest batches step down to the right. Batches
narrower than a pixel share a box with their neighbours, so every box can be seen.

The first batch begins at the least time, on a wall clock 1970, and since may be as old. If the times before
the end of the first batch would take most of the picture, the picture begins shortly before that end: it cuts
the first box, breaks the ruler, and points with arrows to earlier marks.

Product times have no single direction. Then batches have the same width, in their order, and a frontier lies
after the batches that it has passed.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from math import log2
from typing import NamedTuple

from aiopersist.base.frontier import Antichain, int_time
from aiopersist.maintenance.inspect import BatchView, HoldView, ShardView
from aiopersist.state.model import Clock
from aiopersist.web.ticks import Tick, ticks
from aiopersist.web.words import counted, frontier_text, short_id, size_text

WIDTH = 1000.0  # units; about the pixels of the page
GUTTER = 104.0  # on the left, for the names of levels
EDGE = 8.0  # on the right
LANES_HEIGHT = 260.0  # of all lanes together, as far as the bounds of each allow
LANE_MIN, LANE_MAX = 20.0, 64.0
BOX_MIN = 3.0  # the height of a batch without rows
NARROW = 1.0  # pixels: a narrower box is drawn with its neighbours
MARGIN = 0.04  # of the span, before the first frontier
STRETCH = 3  # the first batch is cut if it is this many times as wide as all others
RULER = 24.0  # the height of the ruler with its numbers
MARK_ROW = 17.0  # the height of a row of labels
MARK_ROWS_MAX = 6
LABEL_CHARS = 24
LETTER = 6.6  # the width of a letter of a label, about


class Axis(NamedTuple):
    """The times in the picture. `bounds` are those of batches; only for times that are no ints."""

    start: float
    end: float
    bounds: tuple[Antichain, ...] = ()
    is_cut: bool = False
    """Whether earlier times are left out."""

    def at(self, frontier: Antichain) -> float:
        """The horizontal place of a frontier, within the picture."""
        share = (self._value(frontier) - self.start) / (self.end - self.start)
        return GUTTER + (WIDTH - GUTTER - EDGE) * min(max(share, 0.0), 1.0)

    def beyond(self, frontier: Antichain) -> str:
        """An arrow for a frontier to the left or to the right of the picture."""
        value = self._value(frontier)
        return "← " if value < self.start else "→ " if value > self.end else ""

    def shows(self, batch: BatchView) -> bool:
        """Whether the picture shows a part of the batch."""
        return self._value(batch.lower) < self.end and self._value(batch.upper) > self.start

    def _value(self, frontier: Antichain) -> float:
        if self.bounds:
            return float(sum(bound <= frontier for bound in self.bounds))
        time = int_time(frontier)
        return self.end if time is None else float(time)


class Box(NamedTuple):
    """A batch, or neighbours that are narrower than a pixel."""

    x: float
    y: float
    width: float
    height: float
    first: int
    """The ordinal of its first batch."""
    last: int
    batches: int
    rows: int
    is_claimed: bool
    """Whether a compaction of it is running."""
    title: str


class Lane(NamedTuple):
    """A level of the spine."""

    level: int
    y: float
    height: float
    is_merging: bool
    """Whether its two batches are being merged."""


class RulerMark(NamedTuple):
    """A frontier on the ruler."""

    x: float
    kind: str
    label: str
    title: str
    row: int | None
    """The row of its label; `None` without room for it."""
    to_left: bool
    """Whether the label is on the left side of it."""


class Picture(NamedTuple):
    """See the header."""

    width: float
    height: float
    gutter: float
    """Where the times begin, to the right of the names of levels."""
    ruler_y: float
    lanes: tuple[Lane, ...]
    boxes: tuple[Box, ...]
    marks: tuple[RulerMark, ...]
    ticks: tuple[Tick, ...]
    start: int | None
    """The first time in the picture; `None` if times are no ints."""
    end: int | None
    is_cut: bool
    """Whether earlier times are left out: the ruler begins with a break."""
    summary: str
    """The picture in words."""


def picture(view: ShardView, window: tuple[int, int] | None = None) -> Picture:
    """The picture of a shard; with `window`, from its first time to before its second."""
    axis = _axis(view, window)
    levels = _levels(view)
    lanes = _lanes(view, levels)
    shown = [batch for batch in view.batches if axis.shows(batch)]
    rows_max = max((batch.len for batch in shown), default=0)
    boxes = [box for lane in lanes for box in _boxes(view, shown, levels, lane, axis, rows_max)]
    marks = _placed(_marks(view), axis)
    ruler_y = (lanes[-1].y + lanes[-1].height if lanes else 0.0) + 4
    rows = 1 + max((mark.row for mark in marks if mark.row is not None), default=0)
    whole = not axis.bounds
    return Picture(
        width=WIDTH,
        height=ruler_y + RULER + rows * MARK_ROW + 8,
        gutter=GUTTER,
        ruler_y=ruler_y,
        lanes=tuple(lanes),
        boxes=tuple(boxes),
        marks=tuple(marks),
        ticks=tuple(_ticks(axis, view.clock)) if whole else (),
        start=int(axis.start) if whole else None,
        end=int(axis.end) if whole else None,
        is_cut=axis.is_cut,
        summary=_summary(view),
    )


def _summary(view: ShardView) -> str:
    return (
        f"{counted(len(view.batches), 'batch')} on {counted(len(view.levels), 'level')}, since "
        f"{frontier_text(view.since, view.clock)}, upper {frontier_text(view.upper, view.clock)}"
    )


def _axis(view: ShardView, window: tuple[int, int] | None) -> Axis:
    frontiers = [view.since, view.upper, *(batch.upper for batch in view.batches)]
    if any(len(f.elements) > 1 or any(isinstance(e, tuple) for e in f.elements) for f in frontiers):
        return Axis(0.0, float(max(len(view.batches), 1)), tuple(batch.upper for batch in view.batches))
    if window is not None:
        return Axis(float(window[0]), float(max(window[1], window[0] + 1)))
    times = [time for f in frontiers if (time := int_time(f)) is not None]
    start, end = min(times, default=0), max(times, default=1)
    ends = [time for batch in view.batches if (time := int_time(batch.upper)) is not None]
    first = min(ends, default=start)
    is_1970 = start == 0 and view.clock is Clock.WALL
    is_cut = start < first and first - start > STRETCH * (end - first) and (first < end or is_1970)
    start = first if is_cut else start
    margin = max(int((end - start) * MARGIN), 1)
    start -= margin
    end += margin if len(times) < len(frontiers) else 0  # room for what has no end
    return Axis(float(max(start, 0)), float(max(end, start + 1, 1)), is_cut=is_cut)


def _levels(view: ShardView) -> dict[int, int]:
    """The level of each batch, by ordinal."""
    spines = sorted((spine.first, number) for number, level in view.levels.items() for spine in level.batches)
    firsts = [first for first, _ in spines]
    if not spines:
        return dict.fromkeys((batch.ordinal for batch in view.batches), 0)
    numbered = ((batch.ordinal, max(bisect_right(firsts, batch.ordinal) - 1, 0)) for batch in view.batches)
    return {ordinal: spines[number][1] for ordinal, number in numbered}


def _lanes(view: ShardView, levels: dict[int, int]) -> list[Lane]:
    """The levels that have batches, the highest first."""
    present = sorted(set(levels.values()), reverse=True)
    height = min(max(LANES_HEIGHT / max(len(present), 1), LANE_MIN), LANE_MAX)
    merging = {number for number, level in view.levels.items() if level.due is not None}
    return [Lane(level, number * height, height, level in merging) for number, level in enumerate(present)]


def _boxes(
    view: ShardView,
    shown: Sequence[BatchView],
    levels: dict[int, int],
    lane: Lane,
    axis: Axis,
    rows_max: int,
) -> Iterator[Box]:
    claimed = [(c.first, c.last) for c in view.claims.values() if c.first >= 0]
    for group in _groups([batch for batch in shown if levels[batch.ordinal] == lane.level], axis):
        first, last = group[0], group[-1]
        left, right = axis.at(first.lower), axis.at(last.upper)
        rows = sum(batch.len for batch in group)
        share = log2(1 + rows) / log2(1 + max(rows_max, rows, 1))
        height = BOX_MIN + (lane.height - 6 - BOX_MIN) * share
        yield Box(
            x=round(left, 2),
            y=round(lane.y + lane.height - height, 2),
            width=round(max(right - left, NARROW), 2),
            height=round(height, 2),
            first=first.ordinal,
            last=last.ordinal,
            batches=len(group),
            rows=rows,
            is_claimed=any(a <= last.ordinal and first.ordinal <= b for a, b in claimed),
            title=_title(group, view.clock),
        )


def _groups(batches: Sequence[BatchView], axis: Axis) -> Iterator[list[BatchView]]:
    """The batches of a lane; narrow neighbours form groups of about a pixel."""
    group: list[BatchView] = []
    for batch in batches:
        narrow = axis.at(batch.upper) - axis.at(batch.lower) < NARROW
        is_next = not group or group[-1].upper == batch.lower
        if group and not (
            narrow and is_next and axis.at(batch.upper) - axis.at(group[0].lower) <= 2 * NARROW
        ):
            yield group
            group = []
        group.append(batch)
        if not narrow:
            yield group
            group = []
    if group:
        yield group


def _title(group: Sequence[BatchView], clock: Clock) -> str:
    first, last = group[0], group[-1]
    name = f"batch {first.ordinal}" if first is last else counted(len(group), "batch")
    size = sum(batch.blob_bytes + batch.inline_bytes for batch in group)
    rows = counted(sum(batch.len for batch in group), "update")
    times = f"{frontier_text(first.lower, clock)} to {frontier_text(last.upper, clock)}"
    return f"{name}: {rows}, {size_text(size)}, {times}"


def _ticks(axis: Axis, clock: Clock) -> Iterator[Tick]:
    for tick in ticks(int(axis.start), int(axis.end), clock):
        yield tick._replace(x=round(axis.at(Antichain(tick.time)), 2))


# --- marks -----------------------------------------------------------------------------------------


def _marks(view: ShardView) -> Iterator[tuple[str, str, Antichain, Clock]]:
    """Kind, label, frontier and clock of each mark, the most important first."""
    yield "since", "since", view.since, view.clock
    yield "upper", "upper", view.upper, view.clock
    for name, consumer in view.subscriptions.items():
        if not consumer.expired:
            yield "subscription", name, consumer.position, view.clock
    for hold in view.holds:
        if hold.kind != "subscription" and hold.since.elements:
            yield hold.kind, _hold_label(hold), hold.since, view.clock


def _hold_label(hold: HoldView) -> str:
    return {"retention": "retain", "reader": f"reader {short_id(hold.id)}"}.get(hold.kind, hold.id)


def _label(arrow: str, label: str, frontier: Antichain, clock: Clock, members: int) -> str:
    """The name of a frontier and the number of others at its place; outside the picture also its time."""
    name = label if members == 1 else f"{label} +{members - 1}"
    name = name if len(name) <= LABEL_CHARS else f"{name[: LABEL_CHARS - 1]}…"
    return f"{arrow}{name}, at {frontier_text(frontier, clock)}" if arrow else name


def _placed(marks: Iterable[tuple[str, str, Antichain, Clock]], axis: Axis) -> list[RulerMark]:
    """The marks, one per kind and pixel; labels are in rows, so that none covers another."""
    groups: dict[tuple[str, int], list[tuple[str, Antichain, Clock]]] = {}
    for kind, label, frontier, clock in marks:
        groups.setdefault((kind, round(axis.at(frontier))), []).append((label, frontier, clock))
    spans: list[list[tuple[float, float]]] = [[] for _ in range(MARK_ROWS_MAX)]
    placed = []
    for (kind, _), members in groups.items():
        label, frontier, clock = members[0]
        x = axis.at(frontier)
        text = _label(axis.beyond(frontier), label, frontier, clock, len(members))
        to_left = x > WIDTH - 30 - LETTER * len(text)
        width = LETTER * len(text) + 12
        span = (x - width, x) if to_left else (x, x + width)
        row = next(
            (n for n, row in enumerate(spans) if all(b < span[0] or span[1] < a for a, b in row)), None
        )
        if row is not None:
            spans[row].append(span)
        title = "; ".join(f"{name} at {frontier_text(f, c)}" for name, f, c in members[:20])
        placed.append(RulerMark(round(x, 2), kind, text, f"{kind}: {title}", row, to_left))
    return placed
