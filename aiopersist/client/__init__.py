"""What a user can ask for: `ap.open`, and the client that it returns.

`open` goes from a location to a client. `client` is a list of forwards: each public call, and the package
that carries it out. `gauges` reads what needs no counting for a view of the metrics.
"""
