"""One call of an `Indexed`, and what its caller is told, as a value that the model can say too."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import aiopersist as ap
from aiopersist.indexed import Fenced, Refused, Stopped, UnknownStream
from tests.indexed.game.model import Allow, Destroy, Look, Register, Row, Seal, Write, summed
from tests.indexed.game.state import TRANSIENT, TYPES, Game, Player, kind_of, stream


async def close(game: Game, player: Player) -> None:
    """Stop it, twice; every call is `Stopped` then."""
    await player.ix.stop()
    await player.ix.stop()
    assert await outcome(game, player, Register("s0")) == ("Stopped",)
    await player.client.aclose()


async def outcome(game: Game, player: Player, command: Any) -> Any:
    """What the caller is told."""
    try:
        return await called(game, player.ix, command)
    except Refused as e:
        return ("Refused", e.seqno, e.stream, e.time, None if e.frontier is None else e.frontier.time)
    except UnknownStream:
        return ("UnknownStream",)
    except ap.CodecMismatch:
        return ("CodecMismatch",)
    except Fenced:
        player.fenced = True
        return ("Fenced",)
    except Stopped:
        return ("Stopped",)
    except ap.StorageUnavailable:
        assert game.faulty
        return ("failed",)
    except ap.Indeterminate as error:
        assert game.faulty
        return ("failed",) if isinstance(command, Look) else ("unknown", error)


async def called(game: Game, ix: Any, command: Any) -> Any:
    match command:
        case Write(entries, slowly):
            given = [(stream(name), slow(rows) if slowly else list(rows)) for name, rows in entries]
            return ("seqno", await ix.write(given))
        case Seal(names, time):
            return ("seqno", await ix.seal([stream(name) for name in names], time))
        case Allow(sinces):
            return ("seqno", await ix.allow_compaction([(stream(name), s) for name, s in sinces]))
        case Register(name, right):
            key, val = TYPES[(kind_of(name) + (not right)) % len(TYPES)]
            made = await ix.register(name, key, val)
            assert made.name == name
            return ("done",)
        case Destroy(name):
            return ("done", await ix.destroy(name))
        case Look(name):
            async with await ix.snapshot(stream(name)) as snapshot:
                return await read_snapshot(game, snapshot)
    raise AssertionError(command)


async def read_snapshot(game: Game, snapshot: Any) -> Any:
    """What it shows, by one of the ways."""
    way = game.rng.randrange(3)
    if way == 0:
        rows = await snapshot.rows()
    elif way == 1:
        parts = snapshot.split(game.rng.choice([1, 2, 3, 9]))
        rows = [row for many in await asyncio.gather(*map(drained, parts)) for row in many]
    else:
        rows = [row async for items in aiter_of(snapshot.split(2)) async for row in items]
    since = snapshot.since.time
    assert all(time >= since for _, _, time, _ in rows), (since, rows)
    return snapshot.seqno, since, snapshot.seal.time, summed(map(tuple, rows))


async def read_carefully(game: Game, snapshot: Any) -> Any:
    try:
        return await read_snapshot(game, snapshot)
    except TRANSIENT:
        assert game.faulty
    return ("failed",)


async def slow(rows: tuple[Row, ...]) -> AsyncIterator[Row]:
    for row in rows:
        await asyncio.sleep(0)
        yield row


async def drained(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def aiter_of(items: Iterable[Any]) -> AsyncIterator[Any]:
    for item in items:
        yield item
