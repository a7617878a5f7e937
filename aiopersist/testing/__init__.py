"""For tests of applications and of stores: real servers, honest faults, and conformance suites.

`application` is for tests of applications. `servers` starts Postgres and S3, `azure` a server of Azure's
blobs, `pgbouncer` a pooler, all by `started`. `faults` wraps stores so that they fail; `proxy` is a network
that fails; `storage` and `stash` are conformance suites, `fixtures` helps them. `model` is an oracle for
shards, `simulation` a world from a seed; `strategies` are for Hypothesis. Needs pytest. The library imports
none of this.
"""

import pytest

pytest.register_assert_rewrite(f"{__name__}.storage", f"{__name__}.stash")  # so that a failure shows values
