"""Many worlds, and of one that fails a smaller one that fails still."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from aiopersist.testing.simulation.network import CALM, STORMY, Weather
from aiopersist.testing.simulation.world import Played, Scenario, simulate

NEARBY = 10  # seeds that are tried without one kind of fault


@dataclass(eq=False)
class Failure(AssertionError):
    """A world in which the scenario fails, made as small as it gets. `str` tells how to play it again."""

    seed: int
    error: BaseException
    weather: Weather
    sizes: dict[str, int]
    worlds: int
    """How many were played before it failed."""
    repeats: bool = True
    """Whether the same world failed a second time."""

    def __str__(self) -> str:
        name = getattr(self.error, "__name__", type(self.error).__name__)
        said = str(self.error).partition("\n")[0]
        rates = {field.name: getattr(self.weather, field.name) for field in fields(Weather)}
        shown = ", ".join(f"{k}={value}" for k, value in rates.items() if value != getattr(CALM, k))
        again = f"simulate(scenario, {self.seed}, Weather({shown}), {self.sizes})"
        if not self.repeats:
            again += "\nIt did not fail a second time: the scenario depends on something outside of its world"
        return f"{name}: {said}\nafter {self.worlds} worlds; play it again:\n    {again}"


def search(scenario: Scenario, seeds: Iterable[int], weather: Weather = STORMY) -> Counter[str]:
    """Play the worlds of all seeds, and return what happened in them. The first that fails is made smaller
    (fewer faults, smaller sizes) as long as it fails in the same way, and raised as `Failure`."""
    counts: Counter[str] = Counter()
    for number, seed in enumerate(seeds, 1):
        played = _played(scenario, seed, weather, {})
        if isinstance(played, BaseException):
            raise _smaller(scenario, seed, weather, played, number) from played
        counts += played.counts
        counts["worlds"] += 1
        counts["seconds"] += int(played.seconds)
    return counts


def _smaller(scenario: Scenario, seed: int, weather: Weather, error: BaseException, worlds: int) -> Failure:
    sizes: dict[str, int] = {}
    if _failing(scenario, seed, weather, sizes, error) is None:
        return Failure(seed, error, weather, sizes, worlds, repeats=False)
    for kind in weather.kinds:
        for other in range(seed, seed + NEARBY):  # without one fault another world may fail in its place
            if (failure := _failing(scenario, other, weather.without(kind), sizes, error)) is not None:
                seed, weather, error = other, weather.without(kind), failure
                break
    for name, drawn in _sizes(scenario, seed, weather, {}).items():
        for fewer in range(drawn):
            if (failure := _failing(scenario, seed, weather, sizes | {name: fewer}, error)) is not None:
                sizes, error = sizes | {name: fewer}, failure
                break
    sizes = _sizes(scenario, seed, weather, sizes)  # none below its least
    return Failure(seed, error, weather, sizes, worlds)


def _failing(
    scenario: Scenario, seed: int, weather: Weather, sizes: dict[str, int], like: BaseException
) -> BaseException | None:
    """The error of that world, if it is of the same type."""
    played = _played(scenario, seed, weather, sizes)
    return played if isinstance(played, BaseException) and type(played) is type(like) else None


def _sizes(scenario: Scenario, seed: int, weather: Weather, sizes: dict[str, int]) -> dict[str, int]:
    """What that world draws."""
    drawn: dict[str, int] = {}

    async def noted(world: Any) -> None:
        try:
            await scenario(world)
        finally:
            drawn.update(world.sizes)

    _played(noted, seed, weather, sizes)
    return drawn


def _played(scenario: Scenario, seed: int, weather: Weather, sizes: dict[str, int]) -> Played | BaseException:
    """What happened in that world, or its error."""
    try:
        return simulate(scenario, seed, weather, sizes)
    except (KeyboardInterrupt, SystemExit):  # all others are the world's: `pytest.fail` raises no `Exception`
        raise
    except BaseException as error:
        return error
