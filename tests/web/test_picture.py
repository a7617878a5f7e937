"""Goal: the picture of a shard shows each batch at its times, in its level, and no more boxes than pixels."""

from dataclasses import dataclass, field
from itertools import pairwise
from math import isclose
from typing import Any

import pytest

from aiopersist.base.frontier import Antichain
from aiopersist.maintenance.inspect import BatchView, HoldView, ShardView
from aiopersist.state.model import Claim, Clock, Level, SpineBatch
from aiopersist.web.picture import GUTTER, NARROW, WIDTH, picture
from aiopersist.web.ticks import TICKS_MAX, ticks


@dataclass
class Drawn:
    """A shard with batches of `(lower, upper, rows)`, each in a level of its own rows."""

    batches: list[tuple[Any, Any, int]]
    since: Any = 0
    clock: Clock = Clock.LOGICAL
    levels: dict[int, list[tuple[int, int]]] | None = None
    claims: dict[int, Claim] = field(default_factory=dict)
    holds: list[HoldView] = field(default_factory=list)

    @property
    def view(self) -> ShardView:
        spread = self.levels or {3: [(0, len(self.batches) - 1)]}
        levels = {
            number: Level(batches=tuple(SpineBatch(first=a, last=b, len=1) for a, b in spans))
            for number, spans in spread.items()
        }
        return ShardView.model_construct(
            since=Antichain(self.since),
            upper=_frontier(self.batches[-1][1]) if self.batches else Antichain(0),
            clock=self.clock,
            batches=[
                BatchView(
                    ordinal=number,
                    lower=_frontier(lower),
                    upper=_frontier(upper),
                    since=Antichain(0) if isinstance(lower, int) else Antichain((0, 0)),
                    len=rows,
                    parts=1,
                    runs=1,
                    blob_bytes=10,
                    inline_bytes=0,
                )
                for number, (lower, upper, rows) in enumerate(self.batches)
            ],
            levels=levels,
            claims=self.claims,
            holds=self.holds,
            subscriptions={},
        )


def hold(kind: Any, id: str, since: int) -> HoldView:
    return HoldView(kind=kind, id=id, owner=None, since=Antichain(since), behind=1, pins=False)


def _frontier(value: Any) -> Antichain:
    return value if isinstance(value, Antichain) else Antichain(value)


def test_a_box_is_as_wide_as_its_interval_and_higher_with_more_rows() -> None:
    drawn = picture(Drawn([(0, 10, 1000), (10, 40, 10), (40, 100, 0)]).view)
    first, second, third = drawn.boxes
    scale = (WIDTH - GUTTER - 8) / 100
    assert isclose(second.width, 30 * scale, abs_tol=0.1)
    assert isclose(second.x, GUTTER + 10 * scale, abs_tol=0.1)
    assert isclose(first.x + first.width, second.x, abs_tol=0.02)
    assert first.height > second.height > third.height > 0
    assert [box.rows for box in drawn.boxes] == [1000, 10, 0]


def test_levels_are_lanes_the_highest_first() -> None:
    drawn = picture(
        Drawn([(0, 5, 9), (5, 7, 4), (7, 8, 1)], levels={7: [(0, 0)], 2: [(1, 1)], 0: [(2, 2)]}).view
    )
    assert [lane.level for lane in drawn.lanes] == [7, 2, 0]
    tops = [box.y for box in drawn.boxes]
    assert tops == sorted(tops)
    for lane, box in zip(drawn.lanes, drawn.boxes, strict=True):
        assert lane.y <= box.y
        assert isclose(box.y + box.height, lane.y + lane.height, abs_tol=0.02)


def test_a_thousand_batches_are_at_most_a_box_for_each_pixel_and_none_is_lost() -> None:
    batches = [(n, n + 1, n % 7) for n in range(5000)]
    drawn = picture(Drawn([*batches, (5000, 9000, 3)]).view)
    assert len(drawn.boxes) <= WIDTH
    assert sum(box.batches for box in drawn.boxes) == 5001
    assert sum(box.rows for box in drawn.boxes) == sum(rows for *_, rows in batches) + 3
    assert all(box.width >= NARROW for box in drawn.boxes)
    covered = [ordinal for box in drawn.boxes for ordinal in range(box.first, box.last + 1)]
    assert covered == list(range(5001))


def test_a_window_shows_its_times_alone() -> None:
    drawn = picture(Drawn([(0, 10, 1), (10, 20, 1), (20, 30, 1)]).view, (10, 20))
    assert [(box.first, box.last) for box in drawn.boxes] == [(1, 1)]
    assert (drawn.start, drawn.end) == (10, 20)
    assert [mark.label[0] for mark in drawn.marks] == ["←", "→"]


def test_on_a_wall_clock_it_does_not_begin_in_1970() -> None:
    now = 1_800_000_000_000_000
    hour = 3_600_000_000
    drawn = picture(Drawn([(0, now, 100), (now, now + hour, 5)], clock=Clock.WALL).view)
    assert drawn.start is not None
    assert now - hour < drawn.start < now
    first, second = drawn.boxes
    assert first.x == GUTTER
    assert second.width > 0.9 * (WIDTH - GUTTER - 8)
    assert 2 <= len(drawn.ticks) <= TICKS_MAX + 1


@pytest.mark.parametrize("since", [0, 1_500, 900_000])
def test_a_since_far_before_the_data_does_not_stretch_the_picture(since: int) -> None:
    holds = [hold("retention", "retain", 2_000), hold("critical", "report", 1_000_020)]
    batches = [(0, 1_000_000, 9), (1_000_000, 1_000_050, 5), (1_000_050, 1_000_100, 5)]
    drawn = picture(Drawn(batches, since=since, holds=holds).view)
    assert drawn.is_cut
    assert drawn.start == 1_000_000 - 4
    assert drawn.boxes[0].x == GUTTER
    assert drawn.boxes[1].width > 0.4 * (WIDTH - GUTTER)
    labels = {mark.kind: mark.label for mark in drawn.marks}
    assert labels["since"] == f"← since, at {since}"
    assert labels["retention"] == "← retain, at 2000"
    assert labels["critical"] == "report"


def test_a_since_near_the_data_is_within_the_picture() -> None:
    for batches in ([(0, 100, 9)], [(0, 60, 9), (60, 90, 1)], []):
        since = 10 if batches else 0
        drawn = picture(Drawn(batches, since=since).view)
        assert not drawn.is_cut
        assert drawn.start is not None
        assert drawn.start <= since
        assert all(not mark.label.startswith("←") for mark in drawn.marks)


def test_a_compaction_under_way_is_marked() -> None:
    drawn = picture(
        Drawn(
            [(n, n + 10, 1) for n in range(0, 60, 10)],
            claims={2: Claim(writer="w", first=2, last=3), -1: Claim(writer="w", first=-1, last=-1)},
        ).view
    )
    assert [box.first for box in drawn.boxes if box.is_claimed] == [2, 3]


def test_frontiers_are_marks_and_labels_never_cover_each_other() -> None:
    holds = [
        HoldView(
            kind="critical",
            id=f"a hold with a long name {n}",
            owner=None,
            since=Antichain(40 + n),
            behind=1,
            pins=False,
        )
        for n in range(30)
    ]
    drawn = picture(Drawn([(0, 1000, 9)], since=35, holds=holds).view)
    assert [mark.kind for mark in drawn.marks[:2]] == ["since", "upper"]
    spans: dict[int, list[tuple[float, float]]] = {}
    for mark in drawn.marks:
        if mark.row is not None:
            width = 6.6 * len(mark.label)
            spans.setdefault(mark.row, []).append(
                (mark.x - width, mark.x) if mark.to_left else (mark.x, mark.x + width)
            )
    for row in spans.values():
        row.sort()
        assert all(a[1] <= b[0] for a, b in pairwise(row))
    assert all(0 <= mark.x <= WIDTH for mark in drawn.marks)


def test_holds_at_the_same_place_are_one_mark() -> None:
    holds = [
        HoldView(kind="reader", id=f"r{n}", owner=None, since=Antichain(10), behind=1, pins=False)
        for n in range(5)
    ]
    (mark,) = (m for m in picture(Drawn([(0, 100, 9)], holds=holds).view).marks if m.kind == "reader")
    assert mark.label == "reader r0 +4"


def test_product_times_lie_in_their_order() -> None:
    view = Drawn([((0, 0), Antichain((1, 0), (0, 5)), 3), (Antichain((1, 0), (0, 5)), (2, 2), 3)]).view
    view = view.model_copy(update={"since": Antichain((0, 0))})
    drawn = picture(view)
    assert drawn.start is None
    assert not drawn.ticks
    first, second = drawn.boxes
    assert isclose(first.width, second.width, abs_tol=0.02)


def test_a_new_shard_and_a_closed_one_have_a_picture() -> None:
    assert picture(Drawn([]).view).boxes == ()
    drawn = picture(Drawn([(0, 10, 1), (10, Antichain(), 1)]).view)
    assert len(drawn.boxes) == 2


@pytest.mark.parametrize("clock", list(Clock))
@pytest.mark.parametrize("span", [1, 7, 60, 3_599, 10**6, 59_999_999, 86_400 * 10**6, 10**15, 2**62])
def test_ticks_are_few_and_within(clock: Clock, span: int) -> None:
    found = ticks(1_000_000, 1_000_000 + span, clock)
    assert len(found) <= TICKS_MAX + 1
    assert all(1_000_000 <= tick.time <= 1_000_000 + span for tick in found)
    assert len({tick.label for tick in found}) == len(found)
