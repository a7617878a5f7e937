"""A world in one process, from one seed: machines that crash, stores that fail, and a clock that skips
all waiting.

`world.py` plays a scenario: an async function of a `World`. `loop.py` is its event loop, `machine.py`
what dies in a crash, `network.py` what happens to requests, `between.py` who else answers them, `stash.py` a
stash beside them, `worlds.py` finds a seed that fails and makes its world smaller."""

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
