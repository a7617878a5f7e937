"""The change of a shard's schema: one commit, if the new schema only adds optional fields."""

from typing import Any

from aiopersist.base.errors import IncompatibleSchema, SchemaMismatch
from aiopersist.data.types.encodings import encoded_as
from aiopersist.data.types.evolve import check_evolution
from aiopersist.data.types.schema import Schema, checked_schema
from aiopersist.shard.commit import commit
from aiopersist.shard.shard import Shard
from aiopersist.state.lifecycle import EvolveSchema


async def evolve_schema(shard: Shard, expected_id: int, schema: Schema[Any, Any, Any]) -> int:
    """See `Client.compare_and_evolve_schema`."""
    current = shard.state.schema_id
    if current != expected_id:
        raise SchemaMismatch(expected_id, current, shard_id=shard.id)
    try:
        stored = shard.schema(current)
        schema = encoded_as(checked_schema(schema), stored)
        check_evolution(stored, schema)
        if shard.state.table and not stored.key.arrow("key").equals(schema.key.arrow("key")):
            raise IncompatibleSchema(
                "key: the keys of a table keep their fields: readers with the old schema could not tell "
                "two keys apart that differ only in a new field"
            )
    except IncompatibleSchema as error:
        error.shard_id = shard.id
        raise
    evolved: int = await commit(shard.register, EvolveSchema(expected_id, schema.to_record()))
    return evolved
