"""What every part of a client works with, built once."""

from dataclasses import dataclass

from aiopersist.resource import Supervisor
from aiopersist.runtime import Runtime
from aiopersist.settings import Settings
from aiopersist.storage.blob import Blob
from aiopersist.storage.consensus import Consensus


@dataclass(frozen=True, slots=True)
class Stack:
    """The two stores behind their wrappers, the limits, the clock, and the owner of tasks."""

    blob: Blob
    consensus: Consensus
    settings: Settings
    runtime: Runtime
    supervisor: Supervisor
