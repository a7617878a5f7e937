"""Plans and commands of compaction: which batches become one, who does it, which results are accepted.

A *spec* names neighbouring batches, with their metadata at the time of the plan. A *claim* prevents two
processes from doing the same spec. It is void once its writer is gone, not after a time. A result is applied
(`Replace`) if its inputs are still exactly as they were read. It may replace only some batches of the spec,
so a compaction with bounded memory, or a bounded number of runs, is useful."""

from collections.abc import Callable, Iterator, Set
from typing import NamedTuple

from msgspec import Struct

from aiopersist.base.frontier import Antichain
from aiopersist.state.command import Commit, Context, Keep, commit, live, refusal_if_gone, renewed
from aiopersist.state.model import COLLECTION, Claim, HollowBatch, State
from aiopersist.state.record import HollowPart, goodbytes_at_most
from aiopersist.state.spine import changed_levels, dropped_levels, spine_of

PASSED_MIN = 1024  # updates: fewer are not worth a compaction
INLINE_RUN_BYTES = 24 * 1024  # in the state, for which a reader pays as much as for a request
INLINE_WEIGHTS = (1 / 16, 1 / 4)  # the least and the greatest cost of a run in the state
ANY = 2  # inputs: the fewest that can become one


class Spec(NamedTuple):
    """Batches to compact: neighbours by ordinal, as the plan saw them; and the since to advance to."""

    inputs: dict[int, HollowBatch]
    since: Antichain

    @property
    def first(self) -> int:
        return next(iter(self.inputs))

    @property
    def last(self) -> int:
        return next(reversed(self.inputs))

    @property
    def lower(self) -> Antichain:
        return self.inputs[self.first].lower

    @property
    def upper(self) -> Antichain:
        return self.inputs[self.last].upper

    @property
    def runs(self) -> int:
        return sum(map(run_count, self.inputs.values()))

    @property
    def weight(self) -> float:
        return sum(map(weight, self.inputs.values()))

    @property
    def parts(self) -> list[HollowPart]:
        return [part for batch in self.inputs.values() for part in batch.parts]

    @property
    def blob_bytes(self) -> int:
        """Bytes of the blobs that the compaction replaces."""
        return sum(part.size for part in self.parts if part.key is not None)

    @property
    def goodbytes(self) -> float:
        """An upper bound of the goodbytes of all its updates; infinite if a part has no such number."""
        return sum(map(goodbytes_at_most, self.parts))


def run_count(batch: HollowBatch) -> int:
    """How many sorted runs the batch has."""
    return len(batch.runs) + 1 if batch.parts else 0


def weight(batch: HollowBatch) -> float:
    """The cost of the batch for a reader; a run in a blob costs one."""
    size = 0
    for part in batch.parts:
        if part.key is not None:
            return max(run_count(batch), 1)
        size += part.size
    least, most = INLINE_WEIGHTS
    return max(run_count(batch), 1) * min(max(size / INLINE_RUN_BYTES, least), most)


def is_compact(batch: HollowBatch, since: Antichain) -> bool:
    """Whether a rewrite of the batch gains nothing: it has at most one run, readers need not truncate it or
    move its times, and its times are advanced as far as possible."""
    marked = any(part.truncated is not None or part.rewrite is not None for part in batch.parts)
    return not batch.parts or (not marked and not batch.runs and since <= batch.since)


def plan(
    state: State, inputs_min: float, now: float, suits: Callable[[Spec], bool] = lambda spec: True
) -> Spec | None:
    """The spec to compact next, of those that `suits` accepts and no live writer claims: the spine batch with
    the most batches or runs, if its `weight` is at least `inputs_min`. For `ANY`, two batches or runs are
    enough. Else `plan_passed`."""
    worth = (spec for spec in _specs(state, now) if is_worth(_inputs(spec), spec.weight, inputs_min))
    specs = [spec for whole in worth if (spec := _without_rest(whole, state)) is not None and suits(spec)]
    if specs:
        return max(specs, key=_inputs)
    passed = plan_passed(state, now)
    return passed if passed is not None and suits(passed) else None


def plan_passed(state: State, now: float) -> Spec | None:
    """The batches that begin before since, if a compaction would make them much smaller: with times advanced
    to since, insertions meet their retractions. In batches that since has passed as a whole, some updates are
    *uncompacted*: they may cancel; the others stay. A compaction is due when there are a third as many
    uncompacted updates as others. So history before since takes at most a third more than it must; each
    update is written four times more for that. (Levels alone would allow three times as much; in LSM trees
    this is the bound on space amplification.) If since is empty: all batches with parts, which nobody will
    read."""
    inputs: dict[int, HollowBatch] = {}
    uncompacted = 0
    for ordinal, batch in state.batches.items():
        if state.since <= batch.lower and state.since.elements:
            break
        inputs[ordinal] = batch
        if batch.upper <= state.since:
            uncompacted += batch.len if batch.uncompacted is None else batch.uncompacted
    length = sum(batch.len for batch in inputs.values())
    if not length or (state.since.elements and uncompacted < max((length - uncompacted) // 3, PASSED_MIN)):
        return None
    if _overlaps(_claimed(state, now), min(inputs), max(inputs)):
        return None
    return Spec(_before_rest(inputs, state), state.since)


def _inputs(spec: Spec) -> int:
    """The number of its batches or of its runs, whichever is greater."""
    return max(len(spec.inputs), spec.runs)


def is_worth(inputs: int, weight: float, inputs_min: float) -> bool:
    """Whether so many batches or runs of that weight are worth a compaction."""
    return inputs >= ANY and (inputs_min <= ANY or weight >= inputs_min)


def plan_all(state: State, last: int, since: Antichain) -> Spec | None:
    """Everything up to the batch of ordinal `last` as one batch, at `since` or later; `None` if it is one
    compact batch already."""
    inputs = _before_rest({o: batch for o, batch in state.batches.items() if o <= last}, state)
    if len(inputs) <= 1 and all(is_compact(batch, since) for batch in inputs.values()):
        return None
    return Spec(inputs, state.since)


def _before_rest(inputs: dict[int, HollowBatch], state: State) -> dict[int, HollowBatch]:
    """The inputs before the *rest*: the newest batches of the state, if they are empty. The rest is not
    merged: a merged batch would no longer tell that there are no updates between the bounds of the rest. A
    subscription with its position there would seem to have something to read, and would expire."""
    left = dict(inputs)
    if inputs and next(reversed(inputs)) == next(reversed(state.batches)):
        while left and not left[next(reversed(left))].parts:
            left.popitem()
    return left or inputs


def _without_rest(spec: Spec, state: State) -> Spec | None:
    """The spec without the rest; `None` if no batches would be merged."""
    inputs = _before_rest(spec.inputs, state)
    if len(inputs) == len(spec.inputs):
        return spec
    left = spec._replace(inputs=inputs)
    return left if _inputs(left) >= ANY else None


def _specs(state: State, now: float) -> Iterator[Spec]:
    claimed = _claimed(state, now)
    batches = iter(state.batches.items())
    for spine in spine_of(state).batches():
        inputs: dict[int, HollowBatch] = {}
        for ordinal, batch in batches:
            inputs[ordinal] = batch
            if ordinal == spine.last:
                break
        if not _overlaps(claimed, spine.first, spine.last):
            yield Spec(inputs, state.since)


def _claimed(state: State, now: float) -> list[tuple[int, int]]:
    """The ranges of ordinals that registered writers, not overdue, claim."""
    lives = {writer for writer, record in state.writers.items() if record.heartbeat + record.lease_s >= now}
    return [(c.first, c.last) for c in state.claims.values() if c.writer in lives]


def _overlaps(ranges: list[tuple[int, int]], first: int, last: int) -> bool:
    """Whether any of `ranges` has an ordinal from `first` to `last`."""
    return any(a <= last and first <= b for a, b in ranges)


class TakeClaim(Struct, frozen=True):
    """Claim these batches for `writer`; `False` if another writer claims or has replaced one of them."""

    writer: str
    inputs: dict[int, HollowBatch]

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if (refusal := refusal_if_gone(state, self.writer)) is not None:
            return refusal
        first, last = next(iter(self.inputs)), next(reversed(self.inputs))
        if _overlaps(_claimed(state, context.now), first, last) or not _unchanged(self.inputs, state):
            return Keep(result=False)
        return _claim(state, context, self.writer, first, last)

    def happened(self, state: State) -> bool:
        """Only its writer releases a claim."""
        return _is_claimed_by(state, next(iter(self.inputs)), self.writer)


class ClaimCollection(Struct, frozen=True):
    """Claim rollup and collection for `writer`; `False` if another writer claims them, or has rolled up or
    collected since the state with this `latest_rollup` and `collected`."""

    writer: str
    latest_rollup: int | None
    collected: int

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if (refusal := refusal_if_gone(state, self.writer)) is not None:
            return refusal
        is_claimed = (COLLECTION, COLLECTION) in _claimed(state, context.now)
        if is_claimed or (state.latest_rollup, state.collected) != (self.latest_rollup, self.collected):
            return Keep(result=False)
        return _claim(state, context, self.writer, COLLECTION, COLLECTION)

    def happened(self, state: State) -> bool:
        """Only its writer releases a claim."""
        return _is_claimed_by(state, COLLECTION, self.writer)


def _claim(state: State, context: Context, writer: str, first: int, last: int) -> Commit:
    claim = Claim(writer=writer, first=first, last=last)
    writers = {writer: renewed(state, writer, context)}
    return commit(state, context, result=True, claims={first: claim}, writers=writers)


def _unchanged(inputs: dict[int, HollowBatch], state: State) -> bool:
    """Whether these neighbours are still as they were read."""
    first, last = next(iter(inputs)), next(reversed(inputs))
    neighbours = {o: b for o, b in state.batches.items() if first <= o <= last}
    newest = neighbours.get(last)
    if newest is not None and not newest.parts:  # appends without updates may have extended an empty batch
        neighbours[last] = newest.replace(upper=inputs[last].upper)
    return neighbours == inputs


class ReleaseClaim(Struct, frozen=True):
    """Release the claim of `writer` that begins at ordinal `first`, if there is one."""

    writer: str
    first: int

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        if state is None or state.finalized or not _is_claimed_by(state, self.first, self.writer):
            return Keep()
        return commit(state, context, drop={"claims": (self.first,)})


def _is_claimed_by(state: State, first: int, writer: str) -> bool:
    claim = state.claims.get(first)
    return claim is not None and claim.writer == writer


class Total(NamedTuple):
    """Updates, and the sum of their diffs modulo 2**64."""

    rows: int
    diffs: int


class Replace(Struct, frozen=True):
    """Replace `inputs` by `batch`, if the state still has the inputs as they were read. The batch has the
    same contents at every time at or beyond its since. The command checks that the sums of diffs agree, and
    that there are not more updates. The result is whether it was applied."""

    writer: str
    inputs: dict[int, HollowBatch]
    batch: HollowBatch
    read: Total
    wrote: Total

    def __call__(self, state: State | None, context: Context) -> Commit | Keep:
        state = live(state)
        if (refusal := refusal_if_gone(state, self.writer)) is not None:
            return refusal
        if not self._fits(state):
            return Keep(result=False)
        first, *rest = self.inputs
        last = [first, *rest][-1]
        spine = spine_of(state)
        spine.replace(first, last, sum(b.len for b in self.inputs.values()), self.batch.len)
        claims = (first,) if _is_claimed_by(state, first, self.writer) else ()
        return commit(
            state,
            context,
            result=True,
            batches={first: self.batch.replace(upper=state.batches[last].upper)},
            writers={self.writer: renewed(state, self.writer, context)},
            **changed_levels(state, spine),
            drop={"batches": tuple(rest), "claims": claims, "levels": dropped_levels(state, spine)},
        )

    def _fits(self, state: State) -> bool:
        return (
            _unchanged(self.inputs, state)
            and self.batch.since <= state.since
            and self.read.diffs == self.wrote.diffs
            and self.wrote.rows <= self.read.rows
        )

    def happened(self, state: State) -> bool | None:
        """The state has its batch, or its inputs; a state without both proves nothing."""
        first = next(iter(self.inputs))
        batch = state.batches.get(first)
        if batch is not None and batch.replace(upper=self.batch.upper) == self.batch:
            return True
        return False if batch == self.inputs[first] else None


def largest_inline_run(state: State) -> tuple[int, ...]:
    """The neighbouring batches without blobs that hold the most inline bytes; empty batches at the ends are
    left out. Claimed batches are left out, too, if there are others."""
    claimed = [(c.first, c.last) for c in state.claims.values()]
    free = {ordinal for ordinal in state.batches if not _overlaps(claimed, ordinal, ordinal)}
    return _largest_inline_run(state, free) or _largest_inline_run(state, state.batches.keys())


def _largest_inline_run(state: State, among: Set[int]) -> tuple[int, ...]:
    best: tuple[int, tuple[int, ...]] = (0, ())
    run: list[int] = []
    for ordinal, batch in [*state.batches.items(), (-1, None)]:
        if batch is not None and ordinal in among and all(part.inline is not None for part in batch.parts):
            if run or batch.parts:
                run.append(ordinal)
            continue
        while run and not state.batches[run[-1]].parts:
            run.pop()
        size = sum(state.batches[o].inline_bytes for o in run)
        best = max(best, (size, tuple(run)))
        run = []
    return best[1]
