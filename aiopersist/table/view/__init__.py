"""The contents of a table in memory, all or a part: `contents` stores them, `lookup` reads keys of the shard,
and `view` follows the shard."""
