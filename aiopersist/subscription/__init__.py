"""Subscriptions: consumers of a shard, or of a table, whose position is durable in the shard's own state.

| module                 | what it has                                                           |
|------------------------|-----------------------------------------------------------------------|
| `open`, `subscription` | the opening of one, and its public calls                              |
| `consumer`             | one opening of it in the state: acknowledgements, heartbeats, fencing |
| `joint`                | acknowledgements in a commit of other writes                          |
| `step`, `share`        | what is handed out; which keys are those of a share                   |
| `view`                 | what a state says of its subscriptions                                |

Steps come from `read/feed.py`. The rules of positions and owners are in `state/subscriptions.py`.

Imports `data`, `read`, `shard`, `state`, `storage`, `write`.
"""
