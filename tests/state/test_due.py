"""Goal: what a commit makes due follows from the state, is found at a cost that does not grow with it, and
counts what lies in the state for less than what lies in blobs."""

from collections.abc import Iterator

import pytest

import aiopersist as ap
from aiopersist.base.frontier import Antichain
from aiopersist.maintenance.due import Weights, due
from aiopersist.state.compaction import INLINE_WEIGHTS, plan
from aiopersist.state.model import HollowBatch, Retention, State
from aiopersist.state.record import HollowPart
from aiopersist.state.spine import Spine
from tests.state.values import SHARD, ZERO

SETTINGS = ap.Settings()
LARGE = 2**30


def batch(ordinal: int, rows: int, *, inline: bool, goodbytes: int = 100) -> HollowBatch:
    where = {"inline": b"0"} if inline else {"key": f"{SHARD}/w/{ordinal}", "goodbytes": goodbytes}
    part = HollowPart(size=10, rows=rows, checksum="c", **where)
    return HollowBatch(lower=Antichain(ordinal), upper=Antichain(ordinal + 1), since=ZERO, parts=(part,))


def growing(count: int, rows: int = 10, *, inline: bool, goodbytes: int = 100) -> Iterator[State]:
    """The states after each of `count` appends."""
    spine, batches = Spine({}, 0), dict[int, HollowBatch]()
    for ordinal in range(count):
        spine.insert(ordinal, rows)
        batches[ordinal] = batch(ordinal, rows, inline=inline, goodbytes=goodbytes)
        yield State(
            shard=SHARD, seqno=ordinal, commit="c", at=0.0, since=ZERO, upper=Antichain(ordinal + 1),
            batches=dict(batches), levels=dict(spine.levels), fuel=spine.fuel,
        )  # fmt: skip


def first_due(states: Iterator[State]) -> tuple[int, State]:
    """The number of appends after which a compaction is due, and the state then."""
    weights = Weights()
    for count, state in enumerate(states, 1):
        owes = due(state, SETTINGS, weights)
        if owes.large or owes.little:
            return count, state
    raise AssertionError("it is never due")


def test_batches_in_the_state_count_for_less() -> None:
    """Goal: they are compacted in steps that are as much larger; nothing is due that cannot be planned."""
    few, in_blobs = first_due(growing(500, inline=False))
    many, in_the_state = first_due(growing(500, inline=True))
    share = int(1 / INLINE_WEIGHTS[0])
    assert few < many <= share * 4 * few
    for state, inputs in ((in_blobs, 4), (in_the_state, share * 4)):
        spec = plan(state, SETTINGS.compaction_inputs_min, 0.0)
        assert spec is not None
        assert len(spec.inputs) >= inputs


def test_two_batches_are_due_where_the_settings_say_so() -> None:
    """Goal: wherever they lie."""
    hasty = ap.Settings(compaction_inputs_min=2)
    for inline in (True, False):
        assert [due(s, hasty, Weights()).little for s in growing(4, inline=inline)][-1]


@pytest.mark.parametrize(("goodbytes", "large"), [(100, False), (LARGE, True)])
def test_only_the_kind_of_compaction_that_is_due_begins(goodbytes: int, large: bool) -> None:
    _, state = first_due(growing(500, inline=False, goodbytes=goodbytes))
    owes = due(state, SETTINGS, Weights())
    assert (owes.large, owes.little) == (large, not large)


@pytest.mark.parametrize(
    ("policy", "hold", "upper", "since"),
    [
        pytest.param({"times": 4}, ZERO, 8, False, id="few times: as many again are not worth a commit"),
        pytest.param({"times": 4}, ZERO, 9, True, id="more than as many again are"),
        pytest.param({"times": 4}, Antichain(1), 9, False, id="from the hold on"),
        pytest.param({"times": 800}, ZERO, 900, False, id="many times: an eighth more is not"),
        pytest.param({"times": 800}, ZERO, 901, True, id="more than an eighth more is"),
        pytest.param({"times": 4}, Antichain(), 900, False, id="a hold of nothing"),
        pytest.param({"seconds": 0.0}, ZERO, 900, False, id="seconds: only a look moves since"),
    ],
)
def test_only_a_number_of_times_is_due_after_a_commit(
    policy: dict[str, float], hold: Antichain, upper: int, since: bool
) -> None:
    (state,) = growing(1, inline=True)
    state = state.replace(upper=Antichain(upper), retention={0: Retention(hold=hold, **policy)})  # type: ignore[arg-type]
    assert due(state, SETTINGS, Weights()).since is since


def test_a_spine_batch_is_weighed_once() -> None:
    """Goal: what is remembered says the same as a look at everything, and a commit weighs few batches."""
    weights, known, weighed, count = Weights(), set[int](), 0, 1000
    keep = []  # so that no identity comes twice
    for state in growing(count, inline=True):
        found = list(weights.of(state))
        assert found == list(Weights().of(state))
        keep.append(found)
        weighed += sum(found_one.inputs for found_one in found if id(found_one) not in known)
        known.update(map(id, found))
    assert weighed <= 12 * count, "about once per level"
