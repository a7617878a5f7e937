"""Checks at the end, when the stores are well again: everything that was committed is there, maintenance
comes to an end, and every blob has a name in a state."""

import asyncio

from aiopersist.indexed import UnknownStream
from aiopersist.shard.log import list_shards, load
from aiopersist.state.names import live_parts
from tests.indexed.game.batches import check_view, inspected, pair_of
from tests.indexed.game.calls import close, outcome, read_snapshot
from tests.indexed.game.listening import take_all
from tests.indexed.game.model import Look, Seal
from tests.indexed.game.owners import open_owner
from tests.indexed.game.state import Game, Player
from tests.support.internals import stack_of


async def verify(game: Game) -> None:
    """Once the stores are well every promise holds: for instances that were open, and for new ones."""
    game.faults.heal()
    await game.faults.land()
    game.note("end")
    if game.owner is None:
        await open_owner(game)
    assert game.owner is not None
    game.possible.segment += 1
    command = Seal((), 0)
    game.possible.judge([command], [await outcome(game, game.owner, command)])
    await check_all(game, game.owner)
    await take_all(game, every=True)
    game.possible.make_alike()
    await check_held(game)
    await check_same(game, game.owner)
    for player in (game.ghost, game.reader, game.owner):
        if player is not None:
            await close(game, player)
    game.ghost = game.reader = None
    game.runtime.jump(1e5)
    game.owner = await game.open()
    await check_all(game, game.owner)
    await work_off(game)
    await check_all(game, game.owner)
    await close(game, game.owner)
    game.runtime.jump(1e5)
    await check_blobs(game)
    game.owner = await game.open(readonly=True)
    await check_all(game, game.owner)
    await close(game, game.owner)


async def check_all(game: Game, player: Player) -> None:
    """Every stream that there is or was; only what was committed."""
    possible = {name for w in game.possible.worlds for name in (*w.model.streams, *w.model.destroyed)}
    for name in [*sorted(possible), "s98"]:
        game.possible.saw(name, await outcome(game, player, Look(name)))
    for name in sorted(game.model.destroyed):
        for call in (
            player.ix.load(name, str, int),
            player.ix.description(name),
            player.ix.inspect(name),
        ):
            refused = await asyncio.gather(call, return_exceptions=True)
            assert isinstance(refused[0], UnknownStream), refused
    for name, kept in game.model.streams.items():
        view = await player.ix.inspect(name)
        assert (view.seal, view.since) == (kept.seal, kept.since)


async def check_held(game: Game) -> None:
    for player in (game.owner, game.reader):
        for snapshot, name, before in player.snapshots if player is not None else ():
            assert await read_snapshot(game, snapshot) == before, name
            await snapshot.aclose()


async def check_same(game: Game, owner: Player) -> None:
    """What the owner has in memory is what is durable."""
    reader = await game.open(readonly=True)
    for name in game.model.streams:
        durable = await reader.ix.inspect(name)
        for _ in range(100 if owner.background else 1):
            mine = await owner.ix.inspect(name)
            if mine.model_copy(update={"in_flight": False}) == durable:
                break
            durable = await reader.ix.inspect(name)
        assert mine.model_copy(update={"in_flight": False}) == durable
    await close(game, reader)


async def work_off(game: Game) -> None:
    """Step and compact until nothing is left to be done: few batches, falling levels."""
    player = game.owner
    assert player is not None
    for _ in range(200):
        requests = await player.ix.step()
        for request in requests:
            await player.ix.apply(request.stream, await player.ix.compact(request))
        views = await inspected(game, player)
        assert views is not None
        if not requests and not any(b[2] < v.trace_upper for v in views.values() for b in v.unsealed):
            break
    else:
        raise AssertionError("there is always more to do")
    for name, view in views.items():
        check_view(game, name, view)
        assert pair_of(game, view) is None
        left = [row for row in game.model.streams[name].rows if row[2] >= view.trace_upper]
        assert not game.possible.exact or all(row[2] >= view.seal for row in left), (name, view)
    await check_steps_are_free(game, player)


async def check_steps_are_free(game: Game, player: Player) -> None:
    """With nothing to do it touches no store."""
    for _ in range(3):
        before = {op: m.count for op, m in player.client.metrics.items()}
        assert await player.ix.step() == []
        after = {op: m.count for op, m in player.client.metrics.items()}
        if before == after:
            return
    raise AssertionError("a step with nothing to do asks the stores")


async def check_blobs(game: Game) -> None:
    """Every blob has a name in a state, and every named blob exists, and is sound."""
    client = await game.maintainer()
    (found,) = await list_shards(stack_of(client))
    report = await client.admin.fsck(found)
    assert report.ok, report.problems
    while (await client.admin.maintain()).did_something:
        pass
    swept = await client.admin.sweep_leaked_blobs(dry_run=False)
    game.counts["blobs leaked"] += len(swept.keys)
    assert game.rude or not swept.keys, swept
    usage = await client.admin.usage()
    assert usage.total == usage.referenced, usage
    assert usage.referenced == usage.current, usage
    state = await load(stack_of(client), found)
    assert state is not None
    there = {key async for key, _ in game.blob.list(found)}
    named = live_parts(state) | {rollup.key for rollup in state.rollups.values()}
    assert there == named, (there - named, named - there)
    assert not state.readers and not state.writers
    assert state.streams is not None
    assert state.streams.owner == ""
    await client.aclose()
