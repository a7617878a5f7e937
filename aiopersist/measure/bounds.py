"""The buckets of histograms."""

BOUNDS_S: tuple[float, ...] = tuple(0.0001 * 2.0**n for n in range(20))
"""The upper bounds of the buckets of every histogram, inclusive: 0.1 ms, doubled up to 52 s. A last bucket
has longer durations."""
