"""On the PYTHONPATH of the session of the tests: the daemons that fork Spark's Python workers import first
what each worker needs.

A worker whose task or hook fails ends, and the next one imports everything again, which takes a second of a
core: most of what tests of failures cost. Sessions in processes of their own do without, and see that imports
in a worker work. Nothing that is imported here may start a thread: a process with threads is not to be
forked."""

import os
import sys

if sys.orig_argv[1:3] == ["-m", "pyspark.daemon"]:
    import gc
    import importlib

    sys.path.insert(0, os.getcwd())  # as `-m` will
    for name in (
        "pandas",
        "pyarrow.compute",
        "pyarrow.parquet",
        "aiopersist.spark.source",
        *sys.orig_argv[3:],
    ):
        importlib.import_module(name)
    sys.path.pop(0)
    assert sys.platform != "linux" or len(os.listdir("/proc/self/task")) == 1
    gc.freeze()
