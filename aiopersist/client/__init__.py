"""`ap.open`, and the client that it returns.

`open` goes from a location to a client. `client`, `admin` and `workers` forward each public call to the
package that carries it out, and so does a part of the client, `versions`: the calls on tags and publications.
`services` has the objects that these calls need, `moved` the calls by their names of version 0.1, and
`gauges` the metrics that are read instead of counted."""
