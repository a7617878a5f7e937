"""Many worlds, and of one that fails a smaller one that fails still."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aiopersist.testing.simulation.network import STORMY, Weather
from aiopersist.testing.simulation.world import Scenario, simulate

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

    def __str__(self) -> str:
        name = getattr(self.error, "__name__", type(self.error).__name__)
        said = str(self.error).partition("\n")[0]
        shown = ", ".join(f"{kind}={getattr(self.weather, kind)}" for kind in self.weather.kinds)
        again = f"simulate(scenario, {self.seed}, Weather({shown}), {self.sizes})"
        return f"{name}: {said}\nafter {self.worlds} worlds; play it again:\n    {again}"


def search(scenario: Scenario, seeds: Iterable[int], weather: Weather = STORMY) -> Counter[str]:
    """Play the worlds of all seeds; what happened in them. The first that fails is made smaller, fewer
    faults and smaller sizes, as long as it fails in the same way, and raised as `Failure`."""
    counts: Counter[str] = Counter()
    for number, seed in enumerate(seeds, 1):
        try:
            played = simulate(scenario, seed, weather)
        except Exception as error:
            raise _smaller(scenario, seed, weather, error, number) from error
        counts += played.counts
        counts["worlds"] += 1
        counts["seconds"] += int(played.seconds)
    return counts


def _smaller(scenario: Scenario, seed: int, weather: Weather, error: Exception, worlds: int) -> Failure:
    sizes: dict[str, int] = {}
    for kind in weather.kinds:
        for other in range(seed, seed + NEARBY):  # without one fault another world may fail in its place
            if (found := _failing(scenario, other, weather.without(kind), sizes, error)) is not None:
                seed, weather, error = other, weather.without(kind), found
                break
    for name, drawn in _sizes(scenario, seed, weather, {}).items():
        for fewer in range(drawn):
            if (found := _failing(scenario, seed, weather, sizes | {name: fewer}, error)) is not None:
                sizes, error = sizes | {name: fewer}, found
                break
    sizes = _sizes(scenario, seed, weather, sizes)  # none below its least
    return Failure(seed, error, weather, sizes, worlds)


def _failing(
    scenario: Scenario, seed: int, weather: Weather, sizes: dict[str, int], like: Exception
) -> Exception | None:
    """The error of that world, if it is of the same type."""
    try:
        simulate(scenario, seed, weather, sizes)
    except Exception as error:
        return error if type(error) is type(like) else None
    return None


def _sizes(scenario: Scenario, seed: int, weather: Weather, given: dict[str, int]) -> dict[str, int]:
    """What that world draws."""
    drawn: dict[str, int] = {}

    async def noted(world: Any) -> None:
        try:
            await scenario(world)
        finally:
            drawn.update(world.sizes)

    try:
        simulate(noted, seed, weather, given)
    except Exception:  # as it does
        return drawn
    return drawn
