"""The part of `StashConformance` about modes, owners and migrations. A take-over *fences* earlier openers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aiopersist import stash as stashes
from aiopersist.base.errors import CodecMismatch, InvalidUsage
from aiopersist.base.frontier import Antichain
from aiopersist.base.runtime import SYSTEM
from aiopersist.stash import AppendBatch, Stash, StashCollection, StashError, TypedCollection
from aiopersist.testing.stash.append import Collection, refused, visible

USERS = TypedCollection("users", str, int)

FENCED_TIMEOUT_S = 30.0

Call = Callable[[Stash, Collection, AppendBatch], Awaitable[Any]]
READS: dict[str, Call] = {
    "iter": lambda s, c, b: s.iter(c),
    "iter_key": lambda s, c, b: s.iter_key(c, "a"),
    "since": lambda s, c, b: s.since(c),
    "upper": lambda s, c, b: s.upper(c),
    "peek_timestamp": lambda s, c, b: s.peek_timestamp(c),
    "peek": lambda s, c, b: s.peek(c),
    "peek_one": lambda s, c, b: s.peek_one(c),
    "peek_key_one": lambda s, c, b: s.peek_key_one(c, "a"),
    "make_batch": lambda s, c, b: c.make_batch(s),
    "typed read": lambda s, c, b: USERS.peek_one(s),
}
CHANGES: dict[str, Call] = {
    "append": lambda s, c, b: s.append([b]),
    "collection": lambda s, c, b: s.collection("new", str, int),
    "update": lambda s, c, b: s.update(c, ("x", 1), 99, 1),
    "update_many": lambda s, c, b: s.update_many(c, [(("x", 2), 99, 1)]),
    "seal": lambda s, c, b: s.seal(c, 9),
    "seal_batch": lambda s, c, b: s.seal_batch([(c, 9)]),
    "compact": lambda s, c, b: s.compact(c, 9),
    "compact_batch": lambda s, c, b: s.compact_batch([(c, 9)]),
    "consolidate": lambda s, c, b: s.consolidate(c),
    "consolidate_batch": lambda s, c, b: s.consolidate_batch([c]),
    "typed insert": lambda s, c, b: USERS.insert_without_overwrite(s, "new", 1),
    "typed upsert": lambda s, c, b: USERS.upsert(s, []),
    "typed delete": lambda s, c, b: USERS.delete(s, lambda k, v: True),
}


class Broken(Exception):
    """The error of a migration step."""


async def never(tx: Stash) -> None:
    pytest.fail("this step must not run")


class StashOwners:
    """Needs the fixtures `url`, `stash` (the owner) and `other` (a shared opener)."""

    async def test_a_take_over_fences_whoever_came_before(self, url: str, stash: Stash, other: Stash) -> None:
        """All transactions of earlier openers are refused for ever; `append([])` needs none."""
        await USERS.upsert_key(stash, "a", 1)
        c = await USERS.get(other)
        new_batch = await c.make_batch(stash)
        for earlier in (stash, other):
            await earlier.confirm_leadership()
        async with stashes.open(url) as owner:
            await USERS.upsert_key(owner, "a", 2)
            before = await visible(owner, c)
            for earlier in (stash, other):
                for call in (READS | CHANGES).values():
                    with refused(fenced=True):
                        await call(earlier, c, new_batch)
                with refused(fenced=True):
                    await earlier.migrate([never])
                with refused(fenced=True):
                    await earlier.confirm_leadership()
                await earlier.append([])
            await owner.confirm_leadership()
            assert await visible(owner, c) == before
            assert (await owner.collection("new", str, int)).id > c.id
        async with stashes.open(url, exclusive=False) as shared:
            assert await visible(shared, c) == before
            with refused(fenced=True):
                await stash.upper(c)

    async def test_who_shares_fences_nobody(self, url: str, stash: Stash, other: Stash) -> None:
        async with stashes.open(url, exclusive=False) as third:
            for number, handle in enumerate((stash, other, third, stash)):
                await USERS.upsert_key(handle, str(number), number)
                await handle.confirm_leadership()
            assert len(await USERS.peek_one(third)) == 4

    async def test_a_stash_may_be_made_by_who_shares_it(self, url: str) -> None:
        async with stashes.open(url, exclusive=False) as one, stashes.open(url, exclusive=False) as two:
            await USERS.upsert_key(one, "a", 1)
            assert await USERS.peek_one(two) == {"a": 1}
        async with stashes.open(url) as owner:
            assert await USERS.peek_one(owner) == {"a": 1}

    async def test_a_busy_owner_is_taken_over(self, url: str, stash: Stash) -> None:
        """No write of the old owner lands once the take-over has returned."""
        c = await USERS.get(stash)
        written = 0

        async def work() -> None:
            nonlocal written
            while True:
                await stash.update(c, ("a", 1), written, 1)
                written += 1

        busy = [asyncio.create_task(work()) for _ in range(3)]
        async with asyncio.timeout(FENCED_TIMEOUT_S):
            while not written:
                await SYSTEM.sleep(0.01)
        async with stashes.open(url) as owner:
            before = await owner.iter(c)
            for task in busy:
                with refused(fenced=True):
                    await asyncio.wait_for(task, FENCED_TIMEOUT_S)
            assert await owner.iter(c) == before
            assert sum(diff for *_, diff in before) == written > 0

    async def test_all_is_there_when_opened_again(self, url: str) -> None:
        async with stashes.open(url) as first:
            c = await USERS.get(first)
            await USERS.upsert(first, [("b", 2), ("a", 1)])
            await first.update(c, ("a", 1), 9, 5)
            before = await visible(first, c)
            assert await first.migrate([lambda tx: tx.peek(c)]) == 1
        for _ in range(2):
            async with stashes.open(url) as again:
                assert await USERS.get(again) == c
                assert await visible(again, c) == before
                assert await again.migrate([never]) == 1

    async def test_read_only(self, url: str, stash: Stash) -> None:
        """A readonly opener sees the writes of others, changes and makes nothing, and is never fenced."""
        await USERS.upsert_key(stash, "a", 1)
        async with stashes.open(url, readonly=True) as reader:
            c = await USERS.get(reader)
            before = await visible(stash, c)
            new_batch = await c.make_batch(reader)
            for call in CHANGES.values():
                with refused():
                    await call(reader, c, new_batch)
            with refused():
                await reader.migrate([never])
            with refused("'new'"):
                await reader.collection("new", str, int)
            assert await visible(reader, c) == before
            async with stashes.open(url) as owner:
                await USERS.upsert_key(owner, "a", 2)
                await reader.confirm_leadership()
                assert await USERS.peek_one(reader) == {"a": 2}
                for call in READS.values():
                    await call(reader, c, new_batch)
                await owner.confirm_leadership()

    async def test_a_savepoint(self, url: str, stash: Stash) -> None:
        """Its changes are seen within it only; it sees one snapshot; it neither is fenced nor fences."""
        await USERS.upsert_key(stash, "a", 1)
        async with stashes.open(url, savepoint=True) as trial:
            c = await USERS.get(trial)
            await USERS.upsert_key(stash, "later", 1)
            before = await visible(stash, c)
            assert await USERS.peek_one(trial) == {"a": 1}
            await trial.confirm_leadership()
            new_batch = await c.make_batch(trial)
            for call in (READS | CHANGES).values():
                await call(trial, c, new_batch)

            async def step(tx: Stash) -> None:
                await TypedCollection("migrated", str, int).upsert_key(tx, "m", 1)

            assert await trial.migrate([step]) == 1
            assert await TypedCollection("migrated", str, int).peek_one(trial) == {"m": 1}
            async with stashes.open(url) as owner, stashes.open(url, readonly=True) as reader:
                await trial.confirm_leadership()
                await trial.update(c, ("b", 5), 50, 1)
                assert (("b", 5), 50, 1) in await trial.iter(c)
                assert await visible(owner, c) == before
                for name in ("new", "migrated"):
                    with refused(f"'{name}'"):
                        await reader.collection(name, str, int)
                assert await owner.migrate([]) == 0

    async def test_a_handle_that_was_never_written(self, url: str, stash: Stash) -> None:
        """A savepoint's collection is not confused with a later one of the same id, or id and name."""
        async with stashes.open(url, savepoint=True) as trial:
            stray, other = await trial.collection("stray", str, int), await trial.collection("c", str, str)
        first = await stash.collection("first", str, int)
        c = await stash.collection("c", str, int)
        assert (first.id, c.id) == (stray.id, other.id)
        for batch in ([(stray, 5), (first, 6)], [(first, 6), (stray, 5)]):
            with refused("'stray'"):
                await stash.seal_batch(batch)
        with refused("'stray'"):
            await stash.update(stray, ("a", 1), 0, 1)
        with pytest.raises(CodecMismatch, match="'c'"):
            await stash.update(other, ("a", "b"), 0, 1)
        assert await visible(stash, first) == await visible(stash, c)

    async def test_where_no_stash_is(self, url: str) -> None:
        """A readonly opener and a savepoint make no stash."""
        for _ in range(2):
            with refused():
                await stashes.open(url, readonly=True)
            with refused():
                async with stashes.open(url, savepoint=True):
                    pass
        with pytest.raises(InvalidUsage):
            await stashes.open(url, readonly=True, savepoint=True)

    # --- migrations ------------------------------------------------------------------------------

    async def test_migrations(self, url: str, stash: Stash, other: Stash) -> None:
        ran: list[str] = []

        async def first(tx: Stash) -> None:
            ran.append("first")
            await USERS.upsert(tx, [("a", 1), ("b", 2)])

        async def second(tx: Stash) -> None:
            ran.append("second")
            renamed = TypedCollection("renamed", str, str)
            await renamed.upsert(tx, [(k, str(v)) for k, v in await USERS.delete(tx, lambda k, v: True)])

        async def third(tx: Stash) -> None:
            """A step can use all calls of a stash."""
            ran.append("third")
            c = await USERS.get(tx)
            new_batch = await c.make_batch(tx)
            for call in (READS | CHANGES).values():
                await call(tx, c, new_batch)
            await tx.confirm_leadership()

        assert await stash.migrate([]) == 0
        assert await stash.migrate([first]) == await other.migrate([never]) == 1
        assert await USERS.peek_one(other) == {"a": 1, "b": 2}
        assert await other.migrate([never, second, third]) == 3
        assert ran == ["first", "second", "third"]
        assert await TypedCollection("renamed", str, str).peek_one(stash) == {"a": "1", "b": "2"}
        assert await stash.upper(await stash.collection("new", str, int)) == Antichain(0)
        for steps in ([], [never], [never, never]):
            with refused():
                await stash.migrate(steps)
        assert await stash.migrate([never] * 3) == 3

    async def test_a_step_that_fails_changes_nothing(self, url: str, stash: Stash, other: Stash) -> None:
        await USERS.upsert_key(stash, "a", 1)

        async def good(tx: Stash) -> None:
            await USERS.upsert_key(tx, "good", 1)

        async def bad(tx: Stash) -> None:
            await USERS.upsert_key(tx, "bad", 1)
            await TypedCollection("made", str, int).upsert_key(tx, "bad", 1)
            await tx.seal(await USERS.get(tx), 9)
            raise Broken

        async def refuses(tx: Stash) -> None:
            await USERS.upsert_key(tx, "bad", 1)
            await tx.seal(await USERS.get(tx), 0)

        for steps, error in [([good, bad, never], Broken), ([never, refuses], StashError)]:
            with pytest.raises(error):
                await stash.migrate(steps)
            assert await other.migrate([never]) == 1
            assert await USERS.peek_one(other) == {"a": 1, "good": 1}
            async with stashes.open(url, readonly=True) as reader:
                with refused("'made'"):
                    await reader.collection("made", str, int)
        await stash.confirm_leadership()
        assert await stash.migrate([never, good]) == 2

    async def test_migrations_at_once_happen_once(self, stash: Stash, other: Stash) -> None:
        """No write that others make meanwhile is lost."""
        await USERS.upsert_key(stash, "n", 0)

        async def count(tx: Stash) -> None:
            n = await USERS.peek_key_one(tx, "n")
            assert n is not None
            await SYSTEM.sleep(0.01)
            await USERS.upsert_key(tx, "n", n + 1)

        one, two, _ = await asyncio.gather(
            stash.migrate([count] * 3), other.migrate([count] * 3), USERS.upsert_key(other, "x", 1)
        )
        assert one == two == 3
        assert await USERS.peek_one(stash) == {"n": 3, "x": 1}

    async def test_a_take_over_during_a_migration(self, url: str, stash: Stash) -> None:
        """The migration happened as a whole before the take-over, or not at all."""
        taking: list[asyncio.Task[Stash]] = []

        async def take(tx: Stash) -> None:
            await USERS.upsert_key(tx, "a", 1)
            taking.append(asyncio.ensure_future(_opened(url)))
            await asyncio.wait(taking, timeout=0.3)

        (outcome,) = await asyncio.gather(stash.migrate([take]), return_exceptions=True)
        assert outcome == 1 or (isinstance(outcome, StashError) and outcome.is_unrecoverable)
        version = 1 if outcome == 1 else 0
        async with await taking[0] as owner:
            assert await owner.migrate([never] * version) == version
            c: StashCollection[str, int] = await USERS.get(owner)
            assert len(await owner.iter(c)) == version


async def _opened(url: str) -> Stash:
    return await stashes.open(url)
