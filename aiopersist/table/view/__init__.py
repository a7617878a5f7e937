"""The contents of a table in memory, all or a part, which follow the shard. `contents` has what is in memory,
`lookup` reads keys of the shard, and `view` keeps both up to date."""
