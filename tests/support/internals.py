"""The one door from a public object to the objects of the packages below it.

What a client or a handle is made of is private. Tests that look at a shard's state or at the stores of a
client go through these functions, and use the names that the packages give each other.
"""

from typing import Any


def stack_of(client: Any) -> Any:
    """The stores of a client, its runtime and its background (`aiopersist/shard/stack.py`)."""
    return client._stack


def shards_of(client: Any) -> Any:
    """The shards that a client has open."""
    return client._shards


def shard_of(handle: Any) -> Any:
    """The shard of a handle (`aiopersist/shard/shard.py`): its register, state and hold."""
    return handle._shard


def session_of(handle: Any) -> Any:
    """The registration of a handle, and the calls that it has begun."""
    return handle._session


def staged_of(batch: Any) -> Any:
    """The parts of a batch, their registration, and their use (`aiopersist/write/staged.py`)."""
    return batch._staged
