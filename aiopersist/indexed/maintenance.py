"""Rounds of maintenance of all streams, and compactions, which the caller of a round carries out.

A step drains, evicts, trims, requests compactions, and collects garbage. The state in memory decides which of
these are due; if none is, there is no request to a store. Writes continue meanwhile.

*Compactions.* At most one per stream is in flight. Each instance has only its own requests: a response to a
request of another instance changes nothing.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from aiopersist.base.errors import Corruption, Error, LeaseExpired, StorageUnavailable
from aiopersist.base.resource import run_bounded
from aiopersist.indexed import arrangement as rules
from aiopersist.indexed import work
from aiopersist.indexed.arrangement import Compaction, Drain, Trim
from aiopersist.indexed.committer import Committer
from aiopersist.indexed.core import Core
from aiopersist.indexed.draft import Maintain, Transition
from aiopersist.indexed.errors import Fenced
from aiopersist.indexed.raw import InlineRoom, RawParts
from aiopersist.indexed.work import Output, StreamContext
from aiopersist.maintenance.shard import ShardMaintenance
from aiopersist.parts.fetch import Named
from aiopersist.parts.named_parts import of_trace, of_unsealed
from aiopersist.state.model import COLLECTION
from aiopersist.state.streams import Arrangement, Rearrangement, TraceBatch, difference, rearranged

T = TypeVar("T")

STEPS_AT_ONCE = 4  # drains and trims: as many as there are worker threads
RESULTS_PER_COMMIT = 256  # keeps a version at a few MB
COLLECTION_VERSIONS = 4  # versions that a collection writes after its rollup, and one more


@dataclass(frozen=True, eq=False)
class CompactionRequest:
    """A compaction that a step requests: of two batches of the trace of `stream` to one. The requesting
    instance accepts one response."""

    stream: str
    plan: Compaction = field(repr=False)

    @property
    def updates(self) -> int:
        """How many updates it reads."""
        return self.plan.older.updates + self.plan.younger.updates


@dataclass(eq=False)
class CompactionResponse:
    """The result of a request."""

    request: CompactionRequest
    batch: TraceBatch = field(repr=False)
    seconds: float
    discard: Callable[[], object] = field(repr=False)
    """Deletes the output, if no version can name it."""
    was_handed_in: bool = False


class Result(NamedTuple):
    """A result for a stream, and its deletion if it is not applied."""

    stream: str
    transition: Transition
    discard: Callable[[], object] = lambda: None


class StreamsMaintenance:
    """See the header."""

    def __init__(self, core: Core, committer: Committer) -> None:
        self.garbage = ShardMaintenance(core.shard)
        self._core = core
        self._committer = committer
        self._turn = asyncio.Lock()
        self._in_flight: dict[str, CompactionRequest] = {}
        self._room = InlineRoom(0)  # for all trims of a round
        self._answered: set[str] = set()  # streams with a response in a running commit
        self._empty_drains: dict[str, Drain] = {}  # by stream, the last drain without updates

    def in_flight(self, stream: str) -> bool:
        """Whether a compaction of that stream was requested and not answered yet."""
        return stream in self._in_flight

    # --- a step ----------------------------------------------------------------------------------

    async def step(self) -> list[CompactionRequest]:
        """One round; returns the compactions that it requests. After a failure it does all other work, then
        raises the first failure, and requests no compaction."""
        requests, failure = await self.round()
        if failure is not None:
            self.withdraw(requests)
            raise failure
        return requests

    async def round(self) -> tuple[list[CompactionRequest], Exception | None]:
        """All work of a step; its compaction requests and first failure. Raises only if none began."""
        failures: list[Exception] = []
        try:
            async with self._turn:
                await self._committer.flush()
                await self._carry_out(self._to_drain(), self._drained, failures)
                self._room = InlineRoom(self._core.inline_room)
                await self._carry_out(self._to_trim(), self._trimmed, failures)
                if self.owes_collection:
                    await self._attempt(self.collect, failures)
                failure = await self._explained(failures[0]) if failures else None
                self._core.counts["failed_steps"] += failure is not None
                return self._requests(), failure
        except BaseException:
            self._core.counts["failed_steps"] += 1
            raise

    async def _attempt(self, work: Callable[[], Awaitable[T]], failures: list[Exception]) -> T | None:
        """Do one of several pieces of work; a failure does not stop the others."""
        try:
            return await work()
        except Exception as error:
            failures.append(error)
            return None

    async def collect(self) -> None:
        """One round of garbage collection. Before it, a heartbeat releases the blobs of closed snapshots,
        which the reader of this instance would still keep."""
        hold = self._core.shard.hold
        with suppress(LeaseExpired):  # then the reader keeps nothing
            await hold.heartbeat()
        await self.garbage.collect()

    def withdraw(self, requests: Iterable[CompactionRequest]) -> None:
        """Drop requests that are not carried out; a later round makes them again."""
        for request in requests:
            if self._in_flight.get(request.stream) is request:
                del self._in_flight[request.stream]

    @property
    def owes_collection(self) -> bool:
        """Whether a rollup and a collection are due, by the number of versions; a failed one pauses."""
        state, every = self._core.state, self._core.stack.settings.rollup_every
        behind = state.seqno - (state.latest_rollup or 0)
        return behind >= max(every, COLLECTION_VERSIONS) and COLLECTION not in self.garbage.backoffs

    def _arrangements(self) -> Iterable[tuple[str, Arrangement]]:
        return self._core.streams.arrangements.items()

    def _to_drain(self) -> list[tuple[str, Drain | None]]:
        """By stream, the drain that is due; `None` if only an eviction is."""
        plans: list[tuple[str, Drain | None]] = []
        for name, now in self._arrangements():
            plan = rules.to_drain(now)
            if plan is not None and plan != self._empty_drains.get(name):
                plans.append((name, plan))
            elif rules.evicted(now) is not None:
                plans.append((name, None))
        return plans

    def _to_trim(self) -> list[tuple[str, Trim]]:
        plans = ((name, rules.to_trim(now)) for name, now in self._arrangements())
        return [(name, plan) for name, plan in plans if plan is not None]

    def _requests(self) -> list[CompactionRequest]:
        requests, arrangements = [], self._core.streams.arrangements
        for by_stream in (self._in_flight, self._empty_drains):
            for name in by_stream.keys() - arrangements.keys():
                del by_stream[name]
        for name, now in self._arrangements():
            if name not in self._in_flight and (plan := rules.to_compact(now)) is not None:
                requests.append(CompactionRequest(name, plan))
        self._in_flight |= {request.stream: request for request in requests}
        return requests

    async def _carry_out(
        self,
        plans: Sequence[tuple[str, T]],
        carry_out: Callable[[str, T], Awaitable[Result]],
        failures: list[Exception],
    ) -> None:
        """Carry out all plans, and apply the results, many by one commit."""
        results: list[Result] = []

        async def one(name: str, plan: T) -> None:
            if name in self._core.streams.arrangements:  # not destroyed meanwhile
                result = await self._attempt(partial(carry_out, name, plan), failures)
                results.extend([result] if result is not None else [])

        try:
            await run_bounded(STEPS_AT_ONCE, [partial(one, *plan) for plan in plans])
            while results:
                chunk, results[:] = results[:RESULTS_PER_COMMIT], results[RESULTS_PER_COMMIT:]
                await self._attempt(partial(self._apply_results, chunk), failures)
        finally:
            for result in results:
                result.discard()

    async def _apply_results(self, results: list[Result]) -> set[str]:
        """Apply results by one commit; returns their streams. Deletes those that surely were not applied."""
        command = Maintain([(result.stream, result.transition) for result in results])
        applied: set[str] | None = None
        try:
            applied = names = set[str](await self._committer.run(command))
            return names
        except (StorageUnavailable, Fenced):  # the commit surely did not happen
            applied = set()
            raise
        finally:
            if applied is None and not command.begun:
                applied = set()
            for result in results:
                if applied is not None and result.stream not in applied:
                    result.discard()

    async def _drained(self, name: str, plan: Drain | None) -> Result:
        if plan is None:
            return Result(name, rules.evicted)
        context = self._context(name)
        async with self._turn_if_large(context, of_unsealed(plan.batches)):
            output = await work.drain(context, plan)
        if output is None:
            self._empty_drains[name] = plan
            return Result(name, rules.evicted)
        return Result(name, partial(_drained_and_evicted, plan, output.batch), self._discarding(output))

    async def _trimmed(self, name: str, plan: Trim) -> Result:
        context = self._context(name)
        raw = RawParts(self._core.shard, context.writer, self._room)
        try:
            async with self._turn_if_large(context, of_unsealed([plan.batch])):
                batch = await work.trim(context, plan, raw)
        except BaseException:
            raw.discard()
            raise
        return Result(name, lambda now: rules.trimmed(now, plan, batch), raw.discard)

    def _turn_if_large(
        self, context: StreamContext, parts: Sequence[Named]
    ) -> AbstractAsyncContextManager[object]:
        """A context that limits large work."""
        return self._core.large_work if context.is_large(parts) else nullcontext()

    async def _explained(self, error: Exception) -> Exception:
        """The error to raise for `error`: another instance may have taken over and deleted a blob."""
        if not isinstance(error, Corruption | LeaseExpired):
            return error
        try:
            await self._core.shard.register.refresh()
            self._core.check_owner()
        except Error as reason:
            return reason
        if isinstance(error, Corruption):
            return error
        text = f"a part that the newest version names is missing: {error}"
        return Corruption(text, shard_id=self._core.shard.id)

    def _context(self, name: str) -> StreamContext:
        core = self._core
        share = core.stack.settings.indexed_inline_total_max_bytes // (4 * len(core.streams.names))
        return StreamContext(
            core.shard, core.schema(name), core.streams.names[name], core.check_owner(), share
        )

    def _discarding(self, output: Output) -> Callable[[], object]:
        spawn = self._core.stack.supervisor.spawn
        return lambda: spawn(output.discard(), "delete parts that are not needed")

    # --- compactions -----------------------------------------------------------------------------

    async def compact(self, request: CompactionRequest) -> CompactionResponse:
        """Carry out a request, without applying it."""
        self._core.arrangement(request.stream)
        began = self._core.stack.runtime.monotonic()
        context, plan = self._context(request.stream), request.plan
        try:
            async with self._turn_if_large(context, of_trace([plan.older, plan.younger])):
                output = await work.compact(context, plan)
        except Exception as error:
            raise await self._explained(error) from error
        seconds = self._core.stack.runtime.monotonic() - began
        return CompactionResponse(request, output.batch, seconds, self._discarding(output))

    async def apply(self, stream: str, response: CompactionResponse | BaseException) -> None:
        """Take the response to a request. Deletes output that surely never is applied."""
        counts, request = self._core.counts, self._in_flight.get(stream)
        if stream not in self._core.streams.arrangements:
            self._in_flight.pop(stream, None)
            request = None
        is_expected = isinstance(response, BaseException) or (
            response.request is request and not response.was_handed_in
        )
        if request is None or not is_expected or stream in self._answered:
            counts["unexpected_responses"] += 1
            self._discard_if_useless(response)
            return
        if isinstance(response, BaseException):
            del self._in_flight[stream]
            counts["failed_compactions"] += 1
            return
        await self._apply(response)

    def _discard_if_useless(self, response: CompactionResponse | BaseException) -> None:
        """Delete the output of a response whose request is no longer in flight."""
        if isinstance(response, BaseException) or response.was_handed_in:
            return
        if self._in_flight.get(response.request.stream) is not response.request:
            response.was_handed_in = True
            response.discard()

    async def _apply(self, response: CompactionResponse) -> None:
        counts, stream = self._core.counts, response.request.stream
        response.was_handed_in = True
        transition = partial(rules.compacted, compaction=response.request.plan, batch=response.batch)
        self._answered.add(stream)
        try:
            applied = await self._apply_results([Result(stream, transition, response.discard)])
        finally:
            self._answered.discard(stream)
            self._in_flight.pop(stream, None)
        if not applied:
            counts["skipped_compactions"] += 1
            return
        counts["compactions"] += 1
        counts["compaction_seconds"] += response.seconds  # type: ignore[assignment]  # a sum of floats
        counts["compaction_bytes"] += sum(part.size for part in response.batch.parts)


def _drained_and_evicted(plan: Drain, batch: TraceBatch, now: Arrangement) -> Rearrangement | None:
    if (drained := rules.drained(now, plan, batch)) is None:
        return None
    after = rearranged(drained, now)
    evicted = rules.evicted(after)
    return difference(now, after if evicted is None else rearranged(evicted, after))
