"""Goal: a listen reads only the batches that may hold updates of its interval, and leaves out no update."""

import random

import aiopersist as ap
from aiopersist.base.frontier import Antichain, advance, join, minimum
from aiopersist.read.interval import batches_of, hold_for
from aiopersist.state.model import HollowBatch, State
from aiopersist.state.record import HollowPart

PRODUCT = ap.Schema(key=int, val=bytes, time=2)
PART = HollowPart(inline=b"x", size=1, rows=1, checksum="c")


def state_of(*batches: HollowBatch) -> State:
    zero = minimum(2)
    return State(
        shard="s", seqno=1, commit="c", at=0, since=zero, upper=zero, batches=dict(enumerate(batches))
    )


def test_no_batch_is_left_out_that_holds_an_update() -> None:
    """Goal: whatever compaction did to the time, as far as the hold of the listen lets it."""
    dice, held = random.Random(3), 0

    def time() -> tuple[int, int]:
        return dice.randrange(4), dice.randrange(4)

    def frontier() -> Antichain:
        return Antichain(*(time() for _ in range(dice.randrange(1, 4))))

    for _ in range(20_000):
        at, as_of, begin, lower, upper = time(), time(), frontier(), frontier(), frontier()
        end, since = begin.join(frontier()), frontier().meet(hold_for(lower, as_of))
        told = join(advance(at, since), as_of)
        is_in_batch = begin.less_equal(at) and not end.less_equal(at)
        if is_in_batch and lower.less_equal(told) and not upper.less_equal(told):
            batch = HollowBatch(lower=begin, upper=end, since=since, parts=(PART,))
            assert batches_of(state_of(batch), lower, upper, as_of) == [batch]
            held += 1
    assert held > 200


def test_a_batch_that_was_compacted_too_far_is_read() -> None:
    """Goal: what the bounds do not tell is looked up."""
    old = HollowBatch(lower=minimum(2), upper=Antichain((1, 0)), since=minimum(2), parts=(PART,))
    far = old.replace(since=Antichain((9, 9)))
    assert batches_of(state_of(old), Antichain((5, 0)), Antichain((6, 0)), (0, 0)) == []
    assert batches_of(state_of(far), Antichain((5, 0)), Antichain((6, 0)), (0, 0)) == [far]


async def test_a_step_reads_the_parts_of_its_interval_alone() -> None:
    """Goal: one blob for one append, after any number of batches, be they compacted or not."""
    settings = ap.Settings(inline_writes_single_max_bytes=0, blob_cache_bytes=0)
    async with ap.open("mem://", maintenance=False, settings=settings) as client:
        writer, reader = await client.writer("p", PRODUCT), await client.reader("p", PRODUCT)

        async def append(n: int) -> None:
            await writer.compare_and_append([(n, b"x", (n, 3), 1)], (n, 0), (n + 1, 0))

        for n in range(30):
            await append(n)
        async with reader.listen((20, 5)) as listen:
            first = await anext(listen.steps())
            assert {update.key for update in first.updates} == set(range(21, 30))
            for n in range(30, 36):
                if n == 33:
                    await client.admin.force_compaction("p")
                before = client.metrics["blob.get"].count + client.metrics["blob.get_range"].count
                await append(n)
                step = await anext(listen.steps())
                assert [update.key for update in step.updates] == [n]
                after = client.metrics["blob.get"].count + client.metrics["blob.get_range"].count
                assert after - before == 1
