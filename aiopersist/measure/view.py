"""The metrics of a client at one moment, as frozen values with a JSON form. Units are seconds and bytes,
unless a field has another. Counts only grow while the client is open; values that may fall are marked
*now*."""

from math import inf

from pydantic import BaseModel

from aiopersist.measure.bounds import BOUNDS_S


class Histogram(BaseModel, frozen=True):
    """A histogram of durations."""

    buckets: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    """The number of durations in each bucket, up to its bound (0.1 ms, doubled up to 52 s, then infinite)."""
    count: int = 0
    """The sum of the buckets."""
    seconds: float = 0.0
    """The sum of the durations."""

    @property
    def mean_s(self) -> float:
        """The mean; 0 for none."""
        return self.seconds / (self.count or 1)

    def quantile_s(self, share: float) -> float:
        """The bound that at least this share of all durations (0.99 for 99 %) did not exceed: at most twice
        the true value. 0 without durations, infinity beyond the last bound."""
        if not 0 <= share <= 1:
            raise ValueError(f"share={share!r} is not between 0 and 1")
        seen, target = 0, share * self.count
        for number, count in enumerate(self.buckets):
            seen += count
            if seen and seen >= target:
                return BOUNDS_S[number] if number < len(BOUNDS_S) else inf
        return 0.0


class RequestsView(BaseModel, frozen=True):
    """The requests to one operation of a store. A repeated request counts again."""

    count: int = 0
    """Requests that began."""
    errors: int = 0
    """Requests that failed, including repeated ones."""
    retries: int = 0
    """How often a failed request was repeated."""
    in_flight: int = 0
    """Requests under way *now*."""
    bytes: int = 0
    """Bytes of values, sent or received."""
    duration: Histogram = Histogram()
    """The durations of ended requests, failed or not."""


class WorkView(BaseModel, frozen=True):
    """Long work of one kind."""

    running: int = 0
    """*Now*."""
    failures: int = 0
    """Pieces of work that raised; due work is tried again."""
    duration: Histogram = Histogram()
    """The durations of successful work; also its number."""


class CacheView(BaseModel, frozen=True):
    """The cache of blobs in memory."""

    hits: int = 0
    """Reads of blobs that cost no request of their own."""
    misses: int = 0
    """Reads of blobs that cost a request."""
    bytes: int = 0
    """Held *now*."""
    bytes_max: int = 0
    """`settings.blob_cache_bytes`."""


class QueuesView(BaseModel, frozen=True):
    """The waiting work of this client *now*. A queue that stays long shows where the time goes."""

    writes: int = 0
    """Calls of `WriteHandle.write`, and operations on tables, that wait for the commit of their group."""
    commits: int = 0
    """Commits that wait for their turn on a shard: at most one of a client is under way on each."""
    uploads: int = 0
    """Blobs under way to the blob store."""
    downloads: int = 0
    """Blobs, or ranges of blobs, under way from it."""
    waiters: int = 0
    """Calls that wait for news of a shard: listens, and reads of times that are not complete."""
    computing: int = 0
    """Work on worker threads."""
    compute: int = 0
    """Work that waits for a worker thread."""


class HandlesView(BaseModel, frozen=True):
    """The handles of this client that are open *now*."""

    writers: int = 0
    readers: int = 0
    holds: int = 0
    """Readers that were opened with `hold=`, and holds of `critical_since`."""
    subscriptions: int = 0
    others: int = 0


class LeasesView(BaseModel, frozen=True):
    """The heartbeats that keep the registrations of this client alive."""

    heartbeats: int = 0
    """Heartbeats that succeeded."""
    late: int = 0
    """Heartbeats that succeeded, but began later than they were due by more than an eighth of the lease: the
    process stood still, its event loop was busy, or heartbeats failed before."""
    failures: int = 0
    """Heartbeats that failed; each is repeated."""
    lost: int = 0
    """Lost registrations: their leases ran out, or another owner took them over."""


class MetricsView(BaseModel, frozen=True):
    """The work of a client since its opening, and its present work."""

    client: str = ""
    """Its name among the clients of this process: `settings.client_name`, else a number."""
    enabled: bool = True
    """`settings.metrics`; without it only the cache, the failures and the values of *now* are known."""
    age_s: float = 0.0
    """Seconds since its opening."""
    requests: dict[str, RequestsView] = {}
    """By `blob.<method>` and `consensus.<method>`, without operations that were never called."""
    commits: Histogram = Histogram()
    """From the call until the commit was durable: its turn, lost races and retries included."""
    versions: int = 0
    """Versions that were written: a commit of several shards writes one for each."""
    mismatches: int = 0
    """Lost races: a commit of another process came first, and ours began again."""
    refusals: int = 0
    """Commands that the newest state refused, for example with `UpperMismatch`."""
    lost_answers: int = 0
    """Commits whose answer was lost, so that the store had to be asked for the outcome."""
    appends: int = 0
    """Appends that wrote; a group of writes counts once."""
    rows: int = 0
    """Updates of these appends."""
    stash: Histogram = Histogram()
    """Changes of stashes that `client.stash()` opened, from the call until the change was durable: its turn,
    repeated plans and requests included. Refused ones are not counted."""
    cache: CacheView = CacheView()
    compactions: WorkView = WorkView()
    collections: WorkView = WorkView()
    queues: QueuesView = QueuesView()
    handles: HandlesView = HandlesView()
    leases: LeasesView = LeasesView()
    stalls: int = 0
    """Waits of more than 5 s, which were logged: for a store, for an outcome, for another process."""
    failures: int = 0
    """Failures of background work. It was tried again, or given up until the next occasion."""
