"""Where the time of a client's commits goes: the store, lost races, waiting, the cache. Pure."""

from typing import NamedTuple

from aiopersist.measure.view import Histogram, MetricsView
from aiopersist.web.words import counted, duration_text, size_text

WRITES = ("consensus.compare_and_set", "consensus.compare_and_set_many")


class CommitLine(NamedTuple):
    """One part of the time of commits."""

    what: str
    figure: str
    means: str


def commit_lines(metrics: MetricsView) -> list[CommitLine]:
    """Empty if there were no commits."""
    commits = metrics.commits
    if not commits.count:
        return []
    means = f"{counted(commits.count, 'commit')}, each measured until it was durable"
    return [
        CommitLine("Total", _took(commits), means),
        _store(metrics),
        _races(metrics),
        _queue(metrics),
        _trouble(metrics),
        _cache(metrics),
    ]


def _store(metrics: MetricsView) -> CommitLine:
    writes = [metrics.requests[op].duration for op in WRITES if op in metrics.requests]
    count, seconds = sum(duration.count for duration in writes), sum(duration.seconds for duration in writes)
    share = seconds / max(metrics.commits.seconds, 1e-9)
    means = f"the mean time to write a version: {min(share, 1):.0%} of the time of commits"
    return CommitLine("The store", duration_text(seconds / max(count, 1)), means)


def _races(metrics: MetricsView) -> CommitLine:
    lost = metrics.mismatches
    share = lost / metrics.commits.count
    means = f"{share:.1%} of commits ran again, because another process committed to the shard first"
    return CommitLine("Lost races", f"{lost:,}", means)


def _queue(metrics: MetricsView) -> CommitLine:
    waiting = metrics.queues.commits
    means = "commits are waiting now: a client makes one at a time on each shard"
    return CommitLine("Waiting", f"{waiting:,}", means)


def _trouble(metrics: MetricsView) -> CommitLine:
    repeated = sum(done.retries for done in metrics.requests.values())
    means = f"requests were repeated after a failure; {counted(metrics.stalls, 'wait')} took more than 5 s"
    return CommitLine("Retries", f"{repeated:,}", means)


def _cache(metrics: MetricsView) -> CommitLine:
    cache = metrics.cache
    lookups = cache.hits + cache.misses
    figure = f"{cache.hits / lookups:.0%}" if lookups else "-"
    means = (
        f"of {counted(lookups, 'read')} of blobs came from memory, "
        f"with {size_text(cache.bytes)} of at most {size_text(cache.bytes_max)} in use"
    )
    return CommitLine("Cache", figure, means)


def _took(histogram: Histogram) -> str:
    half, most = (duration_text(histogram.quantile_s(share)) for share in (0.5, 0.99))
    return f"{duration_text(histogram.mean_s)} on average, half within {half}, 99 % within {most}"
