"""What is called next, drawn from the seed: commands mostly legal, at times that are mostly close."""

from typing import Any

from tests.indexed.game.model import Allow, Destroy, Kept, Look, Register, Row, Seal, Write
from tests.indexed.game.state import TYPES, VALUES, Game, kind_of


def some_name(game: Game) -> str:
    there = [*game.model.streams]
    if there and game.rng.random() < 0.95:
        return game.rng.choice(there)
    return game.rng.choice([*sorted(game.model.destroyed), "s98", f"s{game.fresh}"])


def some_command(game: Game) -> Any:
    pick = game.rng.random()
    if not game.model.streams or pick < 0.05:
        game.fresh += game.rng.random() < 0.5 and game.fresh < 9
        name = f"s{game.rng.randrange(game.fresh + 1)}"
        there = all(name in w.model.streams for w in game.possible.worlds)
        return Register(name, not there or game.rng.random() < 0.7)
    if pick < 0.065:
        return Destroy(some_name(game))
    if pick < 0.5:
        entries = [(name, some_rows(game, name)) for name in some_names(game, [1, 1, 2, 3])]
        return Write(tuple(entries), game.rng.random() < 0.1)
    if pick < 0.76:
        names = some_names(game, [0, 1, 1, 2, 3])
        most = max((kept_of(game, name).seal for name in names), default=0)
        return Seal(names, max(0, most + game.rng.choice([-2, 0, 1, 1, 2, 2, 3, 5])))
    sinces = [(name, some_since(game, kept_of(game, name))) for name in some_names(game, [0, 1, 1, 2])]
    return Allow(tuple(sinces))


def some_commands(game: Game, least: int) -> list[Any]:
    game.possible.segment += 1
    many = range(game.rng.randint(least, 6))
    return [Look(some_name(game)) if game.rng.random() < 0.15 else some_command(game) for _ in many]


def some_changes(game: Game, least: int) -> list[Any]:
    return [c for c in some_commands(game, least) if not isinstance(c, Look)]


def kept_of(game: Game, name: str) -> Kept:
    return game.model.streams.get(name, Kept())


def some_since(game: Game, kept: Kept) -> int:
    ahead = max(kept.since, kept.seal)
    near = [kept.since - 1, kept.since, kept.since + 1, kept.since + 3, kept.seal - 1, kept.seal + 2]
    return max(0, game.rng.choice([*near, *[ahead] * 6]))


def some_names(game: Game, sizes: list[int]) -> tuple[str, ...]:
    return tuple(some_name(game) for _ in range(game.rng.choice(sizes)))


def some_rows(game: Game, name: str) -> tuple[Row, ...]:
    rng, (key, val), seal = game.rng, TYPES[kind_of(name)], kept_of(game, name).seal
    early = -3 if rng.random() < 0.04 else 0
    return tuple(
        (
            rng.choice(VALUES[key]),
            rng.choice(VALUES[val][:2]),
            max(0, seal + rng.choice([0, 0, 1, 2, 3, 5, 9]) + early),
            rng.choice([-2, -1, -1, 1, 1, 1, 3]),
        )
        for _ in range(rng.choice([0, 1, 1, 2, 3, 5, 12] if rng.random() < 0.6 else [1, 2]))
    )
