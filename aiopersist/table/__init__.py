"""Tables: at most one val per key, on a shard with a wall clock.

A table keeps a *view* of its shard in memory (`view.py`). Calls that wait at the same moment are applied to
the views in their order (`operation.py`), and made durable by one commit (`group.py`). `kind.py` turns keys
and vals into texts and back; `feed.py` makes changes by key of the updates of a listen.

It imports what stands below handles: `read`, `write`, `shard`, `data`.
"""
