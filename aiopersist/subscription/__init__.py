"""Subscriptions: consumers with a durable position in the state of a shard.

| module                 | what it has                                                           |
|------------------------|-----------------------------------------------------------------------|
| `open`, `subscription` | the opening of a subscription, and its public calls                   |
| `consumer`             | one opening in the state: acknowledgements, heartbeats, fencing       |
| `joint`, `order`       | acknowledgements in a commit of other writes, and their order         |
| `step`, `share`        | steps; the keys of a share                                            |
| `view`                 | a view of the subscriptions in a state                                |

Steps come from `read/feed.py`. The rules of positions and owners are in `state/subscriptions.py`.

Imports `data`, `read`, `shard`, `state`, `storage`, `write`.
"""
