"""What a user can ask for: `ap.open`, and the client that it returns.

`open` goes from a location to a client. `client`, `admin` and `workers` are lists of forwards: each public
call, and the package that carries it out. `services` has the objects that these calls need; `moved` the calls
by their names of version 0.1; `gauges` what needs no counting for a view of the metrics.
"""
