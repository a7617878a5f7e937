"""Schemas and rows that several Spark tests write."""

import aiopersist as ap
from tests.spark.plain_client import at

COLUMNS = "id long, name string"


PLAIN = ap.Schema(str, int | None)  # as a new shard of Spark's columns has it


def shards(place: str) -> set[str]:
    return set(at(place, lambda client: client.list_shards()))
