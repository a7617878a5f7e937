"""Compaction: neighbouring batches become one, sorted and consolidated, with times advanced to since.

1. *Claim* the batches of the spec. If all their parts are inline, a compaction costs less than a claim, so
   there is none.
2. *Rewrite* them (`parts/rewrite.py`). If they have more runs than the memory allows, rewrite only some runs
   or batches; the next compaction continues.
3. *Apply*: a commit replaces the inputs if the state still has them unchanged. If not, delete the written
   parts; if the outcome is unknown, leave them to the sweep.

Memory: `settings.compaction_memory_bytes`, for any size of the input. Readers continue: the parts that they
have pinned stay until a collection finds that no reader needs them.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import inf
from typing import NamedTuple

from aiopersist.base.errors import BatchExpired, Corruption, LeaseExpired
from aiopersist.base.frontier import Antichain
from aiopersist.base.progress import progress
from aiopersist.parts.fetch import Named, Selection
from aiopersist.parts.rewrite import Budget, Target, rewrite
from aiopersist.parts.runs import plan_runs
from aiopersist.parts.sorted_parts import SortedParts
from aiopersist.shard.attempt import Slot, Unknowable
from aiopersist.shard.commit import commit
from aiopersist.shard.registration import Registration
from aiopersist.shard.shard import Shard
from aiopersist.state.compaction import ReleaseClaim, Replace, Spec, TakeClaim, Total, plan_all, run_count
from aiopersist.state.model import HollowBatch
from aiopersist.state.record import HollowPart


class Work(NamedTuple):
    """The share of a spec that fits in the budget: `read` becomes one run, `kept` is not changed."""

    spec: Spec
    read: Sequence[Sequence[Named]]
    """The runs to read."""
    kept: Sequence[HollowPart]
    kept_runs: tuple[int, ...]

    @property
    def parts(self) -> list[Named]:
        """The parts to read."""
        return [named for run in self.read for named in run]

    def batch(self, parts: Sequence[HollowPart], uncompacted: int | None) -> HollowBatch:
        """The batch that replaces the inputs: `parts`, which are one run, then the kept parts."""
        runs = tuple(len(parts) + start for start in self.kept_runs)
        return HollowBatch(
            lower=self.spec.lower,
            upper=self.spec.upper,
            since=self.spec.since,
            parts=(*parts, *self.kept),
            runs=runs if parts else runs[1:],
            uncompacted=None if self.kept else uncompacted,
        )


def bounded(spec: Spec, runs_max: int) -> Work:
    """The whole spec, if it has at most `runs_max` runs in the blob store. Else neighbouring batches within
    this limit; without two of these the batch with the most runs, or the smallest of its runs."""
    inputs = _window(spec.inputs, runs_max)
    if len(inputs) < min(2, len(spec.inputs)):
        ordinal = max(spec.inputs, key=lambda o: run_count(spec.inputs[o]))
        inputs = {ordinal: spec.inputs[ordinal]}
    if len(inputs) > 1 or sum(map(_runs_in_blobs, inputs.values())) <= runs_max:
        read = plan_runs([(batch, part) for batch in inputs.values() for part in batch.parts])
        return Work(Spec(inputs, spec.since), read, (), ())
    (batch,) = inputs.values()
    planned = plan_runs([(batch, part) for part in batch.parts])
    planned.sort(key=lambda run: sum(part.rows for _, part in run))
    kept = [part for run in planned[runs_max:] for _, part in run]
    lengths = [len(run) for run in planned[runs_max:]]
    starts = tuple(sum(lengths[:n]) for n in range(len(lengths)))
    return Work(Spec(inputs, spec.since), planned[:runs_max], kept, starts)


def _runs_in_blobs(batch: HollowBatch) -> int:
    """The runs of a batch with blobs. One without counts 0: all inline parts together are one run."""
    return run_count(batch) if any(part.key for part in batch.parts) else 0


def _window(batches: dict[int, HollowBatch], runs_max: int) -> dict[int, HollowBatch]:
    """Neighbouring batches with at most `runs_max` runs. A window starts at each batch and is as long as the
    limit allows. The best one rewrites the fewest updates per saved batch: so few updates are merged
    often."""
    ordinals = list(batches)
    runs = [_runs_in_blobs(batch) for batch in batches.values()]
    before = list(accumulate((batch.len for batch in batches.values()), initial=0))  # updates
    best, end, held = (inf, 0, 0), 0, 0  # cost, start, end
    for start in range(len(ordinals)):
        while end < len(ordinals) and held + runs[end] <= runs_max:
            held, end = held + runs[end], end + 1
        if end - start >= 2 or end == len(ordinals) == 1:
            best = min(best, ((before[end] - before[start]) / max(end - start - 1, 1), start, end))
        if end == len(ordinals):
            break
        if end > start:
            held -= runs[start]
        else:
            end = start + 1
    return {ordinal: batches[ordinal] for ordinal in ordinals[best[1] : best[2]]}


async def compact_all(shard: Shard, registration: Registration, last: int, since: Antichain) -> None:
    """Compact all batches up to ordinal `last` to one batch of one run, at `since` or later. Waits while
    another process has a claim on one of them. `BatchExpired` if the registration has ended."""
    delays = shard.stack.runtime.delays()
    stall = shard.stack.stall_log(lambda: f"a compaction of {shard.label}")
    while (spec := plan_all(shard.state, last, since)) is not None:
        if not registration.alive:
            text = f"writer {registration.writer} of this compaction is no longer registered: start it again"
            raise BatchExpired(text, shard_id=shard.id)
        if not await compact(shard, spec, registration):
            stall.note("another process compacts it")
            await shard.stack.runtime.sleep(next(delays))
            await shard.open()


async def compact(shard: Shard, spec: Spec, registration: Registration, *, claims_all: bool = False) -> bool:
    """Compact as much of `spec` as the memory allows; whether that was applied. One commit, two with a blob
    or with `claims_all`; requests for every part that is read or written. After an error it releases the
    claim; if that fails, too, the claim ends with the registration. `Corruption` if a blob is lost."""
    with shard.stack.work("compaction", shard.known_as) as observed:
        observed.done = await _compact_claimed(shard, spec, registration.writer, claims_all=claims_all)
        return observed.done


async def _compact_claimed(shard: Shard, spec: Spec, writer: str, *, claims_all: bool) -> bool:
    work = bounded(spec, Budget.of(shard.stack.settings).runs_max(spec.parts))
    claims = claims_all or any(part.key is not None for _, part in work.parts)
    if claims and not await commit(shard.register, TakeClaim(writer, work.spec.inputs)):
        return False
    release = ReleaseClaim(writer, work.spec.first)
    try:
        applied = await _compact_unless_replaced(shard, work, writer)
    except BaseException:
        if claims:
            shard.stack.supervisor.spawn(commit(shard.register, release), "release a claim")
        raise
    if claims and not applied:
        await commit(shard.register, release)
    return applied


async def _compact_unless_replaced(shard: Shard, work: Work, writer: str) -> bool:
    """As `_compact`. A missing blob: `False` if another process has replaced its batch, else `Corruption`."""
    try:
        return await _compact(shard, work, writer)
    except LeaseExpired as error:
        state = await shard.open()
        if all(state.batches.get(o) == batch for o, batch in work.spec.inputs.items()):
            raise Corruption(f"the newest version names a part that is missing: {error}") from error
        return False


async def _compact(shard: Shard, work: Work, writer: str) -> bool:
    inputs, since = work.spec.inputs, work.spec.since
    if not since.elements:  # no reader will ever read the updates
        empty = HollowBatch(lower=work.spec.lower, upper=work.spec.upper, since=since)
        return await _apply(shard, Replace(writer, inputs, empty, Total(0, 0), Total(0, 0)), None)
    with progress("compaction", sum(part.rows for _, part in work.parts), "rows") as step:
        target = target_of(shard, work, writer)
        done = await rewrite(shard, work.read, Selection(advance_to=since), target, step.advance)
    batch = work.batch(done.parts, done.output.uncompacted)
    return await _apply(shard, Replace(writer, inputs, batch, done.read, done.output.wrote), done.output)


def target_of(shard: Shard, work: Work, writer: str) -> Target:
    """The target of the rewrite: at most as many inline bytes as in the inputs."""
    inline = sum(part.size for _, part in work.parts if part.inline is not None)
    inline_max = min(shard.stack.settings.inline_writes_single_max_bytes, inline)
    schema = shard.schema(shard.state.schema_id)
    return Target(schema, writer, work.spec.lower, work.spec.since, inline_max)


async def _apply(shard: Shard, command: Replace, output: SortedParts | None) -> bool:
    slot = Slot()
    try:
        done: bool = await commit(shard.register, command, slot)
    except BatchExpired:
        done = False
    except Unknowable:  # a version may name the parts, so they must not be deleted
        return False
    except BaseException:
        if output is not None and not slot.busy:  # nothing was sent
            shard.stack.supervisor.spawn(output.discard(), "delete parts of a compaction that failed")
        raise
    if output is not None and not done:
        await output.discard()
    return done
