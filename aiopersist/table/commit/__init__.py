"""The group commit. `operation` has the reads and writes of a put, update or insert; `plan` applies all
waiting operations to the views, for one commit. Both are pure. `participant` is a shard of the commit;
`group` has the queue."""
