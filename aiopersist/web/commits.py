"""Why the commits of a client take what they take: the store, lost races, waiting, the cache. Pure."""

from typing import NamedTuple

from aiopersist.measure.view import Histogram, MetricsView
from aiopersist.web.words import counted, duration_text, size_text

WRITES = ("consensus.compare_and_set", "consensus.compare_and_set_many")


class CommitLine(NamedTuple):
    """One of the things that a commit's time goes to."""

    what: str
    figure: str
    means: str


def commit_lines(metrics: MetricsView) -> list[CommitLine]:
    """None if there were no commits."""
    commits = metrics.commits
    if not commits.count:
        return []
    means = f"{counted(commits.count, 'commit')}, each until it was durable"
    return [
        CommitLine("All of it", _took(commits), means),
        _store(metrics),
        _races(metrics),
        _queue(metrics),
        _trouble(metrics),
        _cache(metrics),
    ]


def _store(metrics: MetricsView) -> CommitLine:
    writes = [metrics.requests[op].duration for op in WRITES if op in metrics.requests]
    count, seconds = sum(found.count for found in writes), sum(found.seconds for found in writes)
    share = seconds / max(metrics.commits.seconds, 1e-9)
    means = f"a write of a version took so long on average: {min(share, 1):.0%} of all that commits took"
    return CommitLine("The store", duration_text(seconds / max(count, 1)), means)


def _races(metrics: MetricsView) -> CommitLine:
    lost = metrics.mismatches
    share = lost / metrics.commits.count
    means = f"{share:.1%} of commits began again, since another process committed to the same shard first"
    return CommitLine("Lost races", f"{lost:,}", means)


def _queue(metrics: MetricsView) -> CommitLine:
    waiting = metrics.queues.commits
    means = "commits wait for their turn now: a client makes one at a time on each shard"
    return CommitLine("Waiting", f"{waiting:,}", means)


def _trouble(metrics: MetricsView) -> CommitLine:
    repeated = sum(done.retries for done in metrics.requests.values())
    means = f"requests repeated after a failure; {counted(metrics.stalls, 'wait')} of more than 5 s"
    return CommitLine("Retries", f"{repeated:,}", means)


def _cache(metrics: MetricsView) -> CommitLine:
    cache = metrics.cache
    asked = cache.hits + cache.misses
    figure = f"{cache.hits / asked:.0%}" if asked else "-"
    means = (
        f"of {counted(asked, 'read')} of blobs were answered from memory, "
        f"which holds {size_text(cache.bytes)} of at most {size_text(cache.bytes_max)}"
    )
    return CommitLine("Cache", figure, means)


def _took(found: Histogram) -> str:
    half, most = (duration_text(found.quantile_s(share)) for share in (0.5, 0.99))
    return f"{duration_text(found.mean_s)} on average, half in {half}, 99 % in {most} at most"
