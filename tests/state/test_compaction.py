"""Goal: the next compaction follows from the state alone: from the requests of the spine and from since,
and never includes a claimed batch."""

from typing import Any

import pytest

import aiopersist as ap
from aiopersist.base.frontier import Antichain
from aiopersist.state.command import Commit, Context, Keep
from aiopersist.state.compaction import Replace, Spec, Total, plan, plan_passed
from aiopersist.state.model import COLLECTION, Claim, HollowBatch, State, Writer
from aiopersist.state.record import HollowPart
from aiopersist.state.spine import Spine
from aiopersist.state.trail import Trail
from tests.state.values import SHARD

NOW = 5.0


def batch(lower: int, upper: int, rows: int, *, goodbytes: int | None = None, runs: int = 1) -> HollowBatch:
    parts = tuple(
        HollowPart(key=f"{SHARD}/w/{lower}-{n}", size=10, rows=rows, checksum="c", goodbytes=goodbytes)
        for n in range(runs if rows else 0)
    )
    ends = (Antichain(lower), Antichain(upper), Antichain(0))
    return HollowBatch(
        lower=ends[0], upper=ends[1], since=ends[2], parts=parts, runs=tuple(range(1, len(parts)))
    )


def state(since: int, rows: list[int], *, claimed: list[tuple[int, int, str]] = [], **values: Any) -> State:  # noqa: B006
    """Batches of so many updates, one time each, with a spine as appends make it."""
    spine = Spine({}, 0)
    for ordinal, length in enumerate(rows):
        spine.insert(ordinal, length)
    return State(
        shard=SHARD,
        seqno=len(rows),
        commit=values.pop("commit", "c"),
        at=0.0,
        since=Antichain(since),
        upper=Antichain(len(rows)),
        batches={n: batch(n, n + 1, length) for n, length in enumerate(rows)},
        levels=spine.levels,
        fuel=spine.fuel,
        writers={"alive": Writer(heartbeat=0, lease_s=10), "overdue": Writer(heartbeat=0, lease_s=1)},
        claims={first: Claim(writer=writer, first=first, last=last) for first, last, writer in claimed},
        **values,
    )


def planned(spec: Spec | None) -> tuple[int, int] | None:
    return None if spec is None else (spec.first, spec.last)


@pytest.mark.parametrize(
    ("since", "rows", "expected"),
    [
        pytest.param(3, [4000, 1000, 1000, 1000], (0, 2), id="half as much was passed"),
        pytest.param(4, [4000, 1000, 1000, 1000], (0, 3), id="all was passed"),
        pytest.param(2, [4000, 1000, 1000, 1000], None, id="too little was passed"),
        pytest.param(0, [4000, 4000, 4000], None, id="since never moved"),
        pytest.param(3, [10, 10, 10], None, id="too few to matter"),
        pytest.param(3, [0, 2000, 2000, 0], (0, 2), id="empty batches are taken along"),
        pytest.param(1, [4000], None, id="alone"),
    ],
)
def test_what_since_has_passed(since: int, rows: list[int], expected: Any) -> None:
    """Goal: the oldest batch was compacted when since had passed it; the others were not."""
    assert planned(plan_passed(settled(state(since, rows)), NOW)) == expected


def settled(found: State) -> State:
    return found.replace(batches={**found.batches, 0: found.batches[0].replace(uncompacted=0)})


def test_a_batch_that_since_has_passed_at_last_is_compacted_once() -> None:
    """Goal: also if nothing ever comes after it."""
    assert plan_passed(state(0, [4000]), NOW) is None
    assert planned(plan_passed(state(1, [4000]), NOW)) == (0, 0)
    assert plan_passed(settled(state(1, [4000])), NOW) is None


def test_what_nobody_will_ever_read_is_given_up() -> None:
    """Goal: with an empty since everything becomes an empty batch, once."""
    found = state(0, [3, 1, 2]).replace(since=Antichain())
    assert planned(plan_passed(found, NOW)) == (0, 2)
    assert plan_passed(found.replace(batches={0: batch(0, 3, 0)}), NOW) is None


@pytest.mark.parametrize(("writer", "free"), [("alive", False), ("gone", True), ("overdue", True)])
def test_what_is_claimed_is_left_alone(writer: str, free: bool) -> None:
    """Goal: unless the writer that claimed it is gone, or would be with the next commit."""
    claimed = [(1, 1, writer)]
    assert (plan_passed(state(3, [4000, 2000, 2000], claimed=claimed), NOW) is not None) is free
    whole = state(0, [1] * 8, claimed=[(0, 7, writer)])
    assert (plan(whole, 2, NOW) is not None) is free


def test_a_claim_of_the_collection_claims_no_batch() -> None:
    assert plan(state(0, [1] * 8, claimed=[(COLLECTION, COLLECTION, "alive")]), 2, NOW) is not None


def test_the_spine_batch_of_the_most_batches_comes_first() -> None:
    """Goal: and only if it is worth it; one that does not suit is passed over, not waited for."""
    found = state(0, [1] * 13)
    spec = plan(found, 2, NOW)
    assert spec is not None
    sizes = [
        len(s.inputs) for s in (plan(found, 2, NOW), plan(found, len(spec.inputs), NOW)) if s is not None
    ]
    assert sizes == [len(spec.inputs)] * 2
    assert plan(found, len(spec.inputs) + 1, NOW) is None
    other = plan(found, 2, NOW, lambda s: s.first != spec.first)
    assert other is not None
    assert other.first != spec.first
    assert len(other.inputs) <= len(spec.inputs)


def test_a_batch_of_many_runs_is_worth_it_alone() -> None:
    found = state(0, [5])
    many = found.replace(batches={0: batch(0, 1, 5, runs=4)})
    assert plan(found, 2, NOW) is None
    assert planned(plan(many, 4, NOW)) == (0, 0)


def test_the_goodbytes_of_a_spec_are_an_upper_bound() -> None:
    """Goal: a part that does not say how large it is counts as endless."""
    known = {0: batch(0, 1, 1, goodbytes=70), 1: batch(1, 2, 1, goodbytes=30)}
    assert Spec(known, Antichain(0)).goodbytes == 100
    assert Spec({**known, 2: batch(2, 3, 1)}, Antichain(0)).goodbytes == float("inf")


def version(number: int, **changes: Any) -> bytes:
    import json

    return json.dumps(
        {"format": 1, "seqno": number, "commit": "c", "prev": "c", "rollup": None, "changes": changes}
    ).encode()


def parts(*keys: str) -> dict[str, Any]:
    return {"parts": [{"key": key, "size": 1} for key in keys] + [{"inline": "eHg="}]}


def test_a_trail_tells_what_was_dropped() -> None:
    """Goal: what was named and is named no more; a part that another batch took over is still named."""
    trail = Trail(state(0, [3]))
    trail.add([version(1, batches={"1": parts("a"), "2": parts("b", "c")})], SHARD)
    assert trail.dropped == set()
    trail.add([version(2, batches={"1": parts("d", "c")}, drop={"batches": [2], "claims": [1]})], SHARD)
    trail.add(
        [version(3, batches={"0": parts("e")}, rollups={"2": {"key": "r", "checksum": "x", "size": 1}})],
        SHARD,
    )
    assert trail.dropped == {"a", "b", f"{SHARD}/w/0-0"}
    assert trail.parts - trail.dropped == {"c", "d", "e"}
    assert trail.rollups[2].key == "r"


@pytest.mark.parametrize("number", [0, 1, 3, 4])
def test_a_version_of_another_history_is_no_part_of_a_trail(number: int) -> None:
    """Goal: what it drops may be there in this one, and a collection would delete it."""
    trail = Trail(state(0, [3]))
    trail.add([version(1, batches={"1": parts("a")})], SHARD)
    with pytest.raises(ap.Corruption, match="does not follow"):
        trail.add([version(number, drop={"batches": [1]})], SHARD)
    trail = Trail(state(0, [3], commit="another"))
    for first in (1, 2):
        with pytest.raises(ap.Corruption, match="restored"):
            trail.add([version(first)], SHARD)


@pytest.mark.parametrize(("writer", "accepted"), [("alive", True), ("gone", False)])
def test_a_result_of_a_writer_that_is_gone_is_refused(writer: str, accepted: bool) -> None:
    """Goal: its blobs may have been swept; though what it read is still there."""
    found = state(0, [1, 1])
    merged = batch(0, 2, 1)
    command = Replace(writer, dict(found.batches), merged, Total(2, 2), Total(1, 2))
    outcome = command(found, Context(now=NOW))
    assert isinstance(outcome, Commit) is accepted
    assert accepted or (isinstance(outcome, Keep) and isinstance(outcome.error, ap.BatchExpired))


def test_a_result_that_lost_a_diff_is_refused() -> None:
    found = state(0, [1, 1])
    command = Replace("alive", dict(found.batches), batch(0, 2, 1), Total(2, 2), Total(1, 1))
    assert command(found, Context(now=NOW)) == Keep(result=False)
