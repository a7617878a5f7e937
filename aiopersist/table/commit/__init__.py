"""The group commit. `operation` says what a put, update or insert reads and writes, `plan` what one commit
makes of all that wait; both are pure. `participant` is a shard of the commit; `group` has the queue."""
