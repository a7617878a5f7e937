"""A world in one process, from one seed: machines that crash, stores that fail, and a clock that skips
all waiting.

`world` plays a scenario, an async function of a `World`; its `Weather` has the rates of faults. `loop` is the
event loop, `machine` the part that dies in a crash, `network` the way of requests, `between` a proxy that
answers instead of a store, `stash` a stash of the world. `worlds` finds a seed that fails, and makes its
world smaller."""

from aiopersist.testing.simulation.machine import Crashed, Machine
from aiopersist.testing.simulation.network import CALM, STORMY, Weather
from aiopersist.testing.simulation.world import Backup, Played, World, simulate
from aiopersist.testing.simulation.worlds import Failure, search

__all__ = [
    "CALM",
    "STORMY",
    "Backup",
    "Crashed",
    "Failure",
    "Machine",
    "Played",
    "Weather",
    "World",
    "search",
    "simulate",
]
