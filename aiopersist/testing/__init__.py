"""For tests of applications and of stores: real servers, honest faults, and conformance suites.

`servers` starts Postgres and S3, `faults` wraps stores that fail, `proxy` is a network that fails,
`storage` and `stash` are suites for backends, `model` is an oracle, `strategies` are for Hypothesis.
Needs pytest; nothing in the library imports it.
"""
