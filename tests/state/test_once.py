"""Goal: an id of `once=` is known again for as long as the page says, and no longer, whatever its hash looks
like and through whatever bytes the state went; and neither commits nor heads grow with the ids that are
there."""

import base64
import gzip
import json
import random
from typing import Any

import pytest

from aiopersist.base.errors import Corruption
from aiopersist.base.frontier import Antichain
from aiopersist.state.command import Commit, Keep
from aiopersist.state.diff import decode_diff
from aiopersist.state.lifecycle import Create
from aiopersist.state.model import Clock, HollowBatch, State
from aiopersist.state.once import IDS_MAX, PAGE_RECORDS, Once, OnceIds, hash_of, packed, unpacked
from aiopersist.state.rollup_file import checksum_of, decode_rollup, encode_rollup
from aiopersist.state.writing import Appended, AppendHollow, CloseTo, RegisterWriter, Write
from tests.state.commands_kit import LEASE_S, History
from tests.state.values import SHARD, ZERO

ROOM = 10**6
KEEP_S = 100.0


def batch(lower: int, upper: int) -> HollowBatch:
    return HollowBatch(lower=Antichain(lower), upper=Antichain(upper), since=ZERO)


def write(history: History, id: str, keep_s: float = KEEP_S) -> Commit | Keep:
    upper = history.live.upper.time
    assert isinstance(upper, int)
    marked = Once((hash_of(id),), keep_s)
    token = f"t{len(history.versions)}"
    return history.run(Write("w", token, batch(upper, upper + 1), {}, ROOM, once=marked))


def shard(clock: Clock = Clock.LOGICAL) -> History:
    history = History()
    history.run(Create(SHARD, {"key": "str"}, ZERO, clock))
    history.run(RegisterWriter("w", LEASE_S * 1e6))
    return history


def done_at(outcome: Commit | Keep) -> Any:
    assert isinstance(outcome, Keep)
    assert isinstance(outcome.result, Appended)
    assert not outcome.result.wrote
    return outcome.result.done_at


def of(*ids: str, at: float = 0.0) -> OnceIds:
    return OnceIds().changed({hash_of(each): time for time, each in enumerate(ids)}, at, 0.0)


# --- the map -------------------------------------------------------------------------------------------


def test_the_newest_record_of_an_id_counts() -> None:
    ids = OnceIds().changed({hash_of("a"): 1}, 0.0, 0.0).changed({hash_of("a"): 7}, 5.0, 0.0)
    assert ids.time_of(hash_of("a"), 0.0) == 7
    assert ids.time_of(hash_of("a"), 5.0) == 7
    assert ids.time_of(hash_of("a"), 5.1) is None
    assert ids.time_of(hash_of("b"), 0.0) is None


@pytest.mark.parametrize("shift", range(1, 40))
def test_a_hash_that_only_looks_like_another_is_not_found(shift: int) -> None:
    """Goal: records lie side by side, so a hash may be there by chance, at any shift: the end of one record
    and the beginning of the next. It is neither taken for a record, nor does it hide one."""
    first, second = "07" * 16, "07" + "ab" * 15
    ids = OnceIds().changed({first: 1, second: 2}, 1.0, 0.0)
    (data,) = ids.pages()
    looked_for = data[shift : shift + 16].hex()
    assert looked_for not in (first, second)
    assert ids.time_of(looked_for, 0.0) is None
    if looked_for.startswith("07"):  # of the same bucket: it comes before and after the true one
        ids = OnceIds().changed({looked_for: 5}, 1.0, 0.0)
        ids = ids.changed({first: 1, second: 2}, 1.0, 0.0)
        assert ids.time_of(looked_for, 0.0) == 5


def test_hashes_of_one_byte_are_found_in_one_bucket() -> None:
    """Goal: all records of a bucket made of one byte only, which overlaps with itself everywhere."""
    same = "00" * 16
    ids = OnceIds().changed({same: 0}, 0.0, 0.0).changed({"00" * 15 + "01": 256}, 0.0, 0.0)
    assert ids.time_of(same, 0.0) == 0
    assert ids.time_of("00" * 15 + "01", 0.0) == 256
    assert ids.time_of("00" * 14 + "0100", 0.0) is None


def test_random_lives_agree_with_a_list() -> None:
    """Goal: against a list of all that ever came: found are exactly those that are young enough."""
    rng = random.Random(7)
    ids, came, now = OnceIds(), list[tuple[str, int, float]](), 0.0
    for time in range(3000):
        now += rng.choice((0.0, 0.1, 1.0))
        new = {hash_of(str(rng.randrange(400))): time for _ in range(rng.choice((1, 1, 3)))}
        ids = ids.changed(new, now, now - KEEP_S)
        came += [(hashed, time, now) for hashed in new]
        asked = hash_of(str(rng.randrange(450)))
        young = [t for hashed, t, at in came if hashed == asked and at >= now - KEEP_S]
        assert ids.time_of(asked, now - KEEP_S) == (young[-1] if young else None)
    assert unpacked(OnceIds(ever=ids.ever), packed(ids)) == ids
    assert len(ids) < len(came) / 2  # the old ones are not only hidden


def test_an_id_is_forgotten_after_a_hundred_thousand_newer_ones() -> None:
    ids = of("first")
    newer = iter(range(IDS_MAX))
    for _ in range(99):
        ids = ids.changed({hash_of(f"n{next(newer)}"): 1 for _ in range(1000)}, 0.0, 0.0)
    ids = ids.changed({hash_of(f"n{next(newer)}"): 1 for _ in range(999)}, 0.0, 0.0)
    assert ids.time_of(hash_of("first"), 0.0) == 0
    ids = ids.changed({hash_of(f"n{next(newer)}"): 1}, 0.0, 0.0)
    assert ids.time_of(hash_of("first"), 0.0) is None
    assert ids.time_of(hash_of("n0"), 0.0) == 1
    for n in range(20):
        ids = ids.changed({hash_of(f"m{n}-{m}"): 1 for m in range(1000)}, 0.0, 0.0)
    assert len(ids) <= IDS_MAX + 256  # each bucket may keep one until it is touched again


def test_a_change_copies_only_the_buckets_that_it_touches() -> None:
    """Goal: what a commit costs does not depend on how many ids there are, but for one bucket of them."""
    ids = of(*map(str, range(20_000)))
    changed = ids.changed({hash_of("new"): 1}, 0.0, 0.0)
    apart = [at for at, data in ids._buckets.items() if changed._buckets[at] is not data]
    assert apart == [bytes.fromhex(hash_of("new"))[0]]
    assert len(ids._buckets[apart[0]]) < 40 * 200


def test_pages_bring_everything_back() -> None:
    ids = of(*map(str, range(3 * PAGE_RECORDS + 17)))
    pages = list(ids.pages())
    assert len(pages) == 4
    assert max(map(len, pages)) == 40 * PAGE_RECORDS
    assert unpacked(OnceIds(ever=ids.ever), packed(ids)) == ids
    assert packed(OnceIds()) == []
    for bad in ("x", base64.b64encode(b"short").decode()):
        with pytest.raises(ValueError, match="page"):
            unpacked(OnceIds(), [bad])


# --- in the state --------------------------------------------------------------------------------------


@pytest.mark.parametrize("clock", list(Clock))
def test_a_repeat_writes_nothing_and_tells_the_first_time(clock: Clock) -> None:
    history = shard(clock)
    assert isinstance(write(history, "a"), Commit)
    first = history.live.upper.time
    assert isinstance(first, int)
    for other in "bcd":
        write(history, other)
    before = history.live
    assert done_at(write(history, "a")) == first - 1
    assert history.live is before


def test_an_append_is_known_again_whatever_it_expects() -> None:
    history = shard()
    marked = Once((hash_of("a"),), KEEP_S)
    history.run(AppendHollow("w", "t1", batch(0, 5), {}, ROOM, once=marked))
    outcome = history.run(AppendHollow("w", "t2", batch(77, 78), {}, ROOM, once=marked))
    assert done_at(outcome) == 4


def test_an_id_is_forgotten_when_its_time_is_over() -> None:
    """Goal: to the very end of its time, counted by the clock of the commits; by a clock that was set back it
    is remembered for longer, never twice written."""
    history = shard()
    write(history, "a")
    history.now += KEEP_S
    assert done_at(write(history, "a")) == 0
    history.now -= 10 * KEEP_S
    assert done_at(write(history, "a")) == 0
    history.now += 10 * KEEP_S + 0.001
    assert isinstance(write(history, "a"), Commit)
    assert done_at(write(history, "a")) == 1


def test_a_group_with_one_repeat_writes_nothing() -> None:
    history = shard()
    write(history, "a")
    marked = Once((hash_of("b"), hash_of("a")), KEEP_S)
    assert done_at(history.run(Write("w", "t9", batch(1, 2), {}, ROOM, once=marked))) == 0
    assert history.live.once.time_of(hash_of("b"), 0.0) is None


# --- formats -------------------------------------------------------------------------------------------


def formats(history: History) -> list[int]:
    return [json.loads(version)["format"] for version in history.versions]


def rolled(state: State) -> tuple[State, int]:
    data = encode_rollup(state)
    return decode_rollup(data, checksum_of(data)), json.loads(gzip.decompress(data).split(b"\n")[0])["format"]


def test_only_what_needs_the_format_has_it() -> None:
    """Goal: a shard with a logical clock and without ids is written as ever; with an id, its version and each
    later rollup are refused by releases that would repeat it."""
    history = shard()
    history.run(Write("w", "t", batch(0, 1), {"app": 1}, ROOM))
    assert formats(history) == [1, 1, 1]
    assert rolled(history.live) == (history.live, 1)
    assert not any(
        word in history.versions[0] + history.versions[2] for word in (b"once", b"clock", b"table")
    )
    write(history, "a")
    history.run(Write("w", "t2", batch(2, 3), {}, ROOM))
    assert formats(history) == [1, 1, 1, 3, 1]
    assert rolled(history.live) == (history.live, 3)


@pytest.mark.parametrize(("clock", "table"), [(Clock.WALL, False), (Clock.WALL, True), (Clock.LOGICAL, True)])
def test_a_clock_and_a_table_need_the_format(clock: Clock, table: bool) -> None:
    history = History()
    history.run(Create(SHARD, {"key": "str"}, ZERO, clock, table))
    assert formats(history) == [3]
    assert (history.live.clock, history.live.table) == (clock, table)
    assert rolled(history.live) == (history.live, 3)


def test_a_rollup_of_many_ids_has_pages_of_them() -> None:
    history = shard()
    ids = of(*map(str, range(10_000)), at=history.now)
    state = history.live.replace(once=ids)
    data = encode_rollup(state)
    lines = gzip.decompress(data).split(b"\n")
    assert len(lines) == 1 + 10
    assert max(map(len, lines)) < 60_000
    assert decode_rollup(data, checksum_of(data)) == state
    lines[3] = lines[3].replace(b'"once":["', b'"once":["?')
    with pytest.raises(Corruption):
        broken = gzip.compress(b"\n".join(lines))
        decode_rollup(broken, checksum_of(broken))


def test_a_version_has_its_own_ids_alone() -> None:
    """Goal: neither the commit nor the head grows with the ids that are there."""
    history = shard()
    write(history, "a")
    few = len(history.versions[-1])
    history.state = history.read = history.live.replace(once=of(*map(str, range(5000)), at=history.now))
    write(history, "b")
    assert len(history.versions[-1]) <= few + 10
    assert list(decode_diff(history.versions[-1]).changes.once.times) == [hash_of("b")]  # type: ignore[union-attr]


# --- closing -------------------------------------------------------------------------------------------


def test_closing_moves_the_upper_forward_only() -> None:
    history = shard(Clock.WALL)
    history.run(CloseTo(Antichain(50)))
    assert history.live.upper == Antichain(50)
    before = history.live
    for upper in (50, 7):
        assert history.run(CloseTo(Antichain(upper))) == Keep()
    assert history.live is before
    assert CloseTo(Antichain(50)).happened(before)
    assert not CloseTo(Antichain(51)).happened(before)
    history.run(
        AppendHollow("w", "t", HollowBatch(lower=Antichain(50), upper=Antichain(), since=ZERO), {}, ROOM)
    )
    assert history.run(CloseTo(Antichain(99))) == Keep()
