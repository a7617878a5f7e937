"""Collections that several tests write."""

from aiopersist.stash import TypedCollection

ACCOUNTS = TypedCollection("accounts", str, int)


NAMES = ["ann", "bob", "eve"]


USERS = TypedCollection("users", int, str)
