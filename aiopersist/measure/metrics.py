"""The live counts of one client. Only its event loop adds to them; any thread may ask for a view.

A count is a plain int, since each append counts: no lock, no label, no wait. A view copies one count after
the other, so two counts may be a moment apart. The classes of views are imported with the first view: most
processes need none.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from aiopersist.measure.bounds import BOUNDS_S

if TYPE_CHECKING:
    from aiopersist.measure.view import Histogram, MetricsView, RequestsView, WorkView


class Latencies:
    """A histogram of durations: each costs a bisection and two additions."""

    __slots__ = ("_buckets", "seconds")

    def __init__(self) -> None:
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self.seconds = 0.0
        """The sum."""

    def add(self, seconds: float) -> None:
        """Add a duration."""
        self._buckets[bisect_left(BOUNDS_S, seconds)] += 1
        self.seconds += seconds

    @property
    def count(self) -> int:
        """The number of durations."""
        return sum(self._buckets)

    def view(self) -> "Histogram":
        """As it is now."""
        from aiopersist.measure.view import Histogram

        buckets = tuple(self._buckets)
        return Histogram(buckets=buckets, count=sum(buckets), seconds=self.seconds)


class OpMetrics:
    """The requests to one operation of a store. `bytes` counts values, sent or received."""

    __slots__ = ("bytes", "count", "errors", "latencies")

    def __init__(self, latencies: Latencies | None = None) -> None:
        self.count = self.errors = self.bytes = 0
        self.latencies = latencies or Latencies()

    @property
    def seconds(self) -> float:
        """Their total duration."""
        return self.latencies.seconds

    @property
    def in_flight(self) -> int:
        """The number of requests under way."""
        return max(self.count - self.latencies.count, 0)  # another thread may see one count before the other


class WorkCounts:
    """Long work of one kind."""

    def __init__(self, latencies: Latencies) -> None:
        self.running = self.failures = 0
        self.latencies = latencies

    def view(self) -> "WorkView":
        """As it is now."""
        from aiopersist.measure.view import WorkView

        return WorkView(running=self.running, failures=self.failures, duration=self.latencies.view())


class OngoingWork:
    """A piece of long work that is under way."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = True
        """Whether it does anything. If another process did the work, it does not count."""


class Observed(NamedTuple):
    """Values that are read for a view: fields of `CacheView`, `QueuesView` and `HandlesView`, by name."""

    failures: int = 0
    cache: Mapping[str, int] = {}
    queues: Mapping[str, int] = {}
    handles: Mapping[str, int] = {}


_named: WeakValueDictionary[str, "Metrics"] = WeakValueDictionary()
"""The open clients of this process."""


class Metrics(Mapping[str, OpMetrics]):
    """The counts of one client. A call returns a `MetricsView`. As a mapping it has the requests to both
    stores, by `blob.<method>` and `consensus.<method>`."""

    enabled = True

    def __init__(self, now: Callable[[], float]) -> None:
        self.name = ""
        self.now = now
        """Seconds of a clock that never goes back."""
        self.observe: Callable[[], Observed] = Observed
        """Set by the client."""
        self._began = now()
        self._ops: dict[str, OpMetrics] = {}
        self._retries: Counter[str] = Counter()
        self._commits = self._latencies("commit")
        self._stash = self._latencies("stash")
        self._work = {kind: WorkCounts(self._latencies(kind)) for kind in ("compaction", "collection")}
        self._versions = self._mismatches = self._refusals = self._lost_answers = 0
        self._appends = self._rows = self._stalls = 0
        self._heartbeats = self._late = self._failed_heartbeats = self._lost_leases = 0

    def _latencies(self, what: str, op: str | None = None) -> Latencies:
        """The histogram for the durations of `what`."""
        return Latencies()

    # --- the life of the client ------------------------------------------------------------------

    def begin(self, base: str) -> None:
        """Give the client a name that is unique among the open clients of this process: `base`, perhaps with
        a number. A client that is opened again gets its old name."""
        number, name = 1, base or "1"
        while _named.setdefault(name, self) is not self:
            number += 1
            name = f"{base}-{number}" if base else str(number)
        self.name = name

    def end(self) -> None:
        """The client is closed: free its name, and release the memory."""
        observed = self.observe()._replace(queues={}, handles={})
        self.observe = lambda: observed
        if _named.get(self.name) is self:
            del _named[self.name]

    # --- requests, as a mapping ------------------------------------------------------------------

    def __getitem__(self, op: str) -> OpMetrics:
        return self._ops.get(op) or OpMetrics()

    def __iter__(self) -> Iterator[str]:
        return iter(self._ops)

    def __len__(self) -> int:
        return len(self._ops)

    def op(self, name: str) -> OpMetrics:
        """The live counts of that operation."""
        op = self._ops.get(name)
        if op is None:
            op = self._ops[name] = OpMetrics(self._latencies("request", name))
        return op

    # --- what happens ----------------------------------------------------------------------------

    def retried(self, op: str) -> None:
        """A failed request is repeated; `op` is a method of a store."""
        self._retries[op] += 1

    def committed(self, began: float, versions: int) -> None:
        """A commit, which began at `began` by `now`, is durable."""
        self._commits.add(self.now() - began)
        self._versions += versions

    def stash_changed(self, began: float) -> None:
        """A change of a stash, which began at `began` by `now`, is durable."""
        self._stash.add(self.now() - began)

    def lost_race(self) -> None:
        """Another process wrote the version that a commit wanted."""
        self._mismatches += 1

    def refused(self) -> None:
        """The newest state refuses a command."""
        self._refusals += 1

    def unanswered(self) -> None:
        """The answer to a compare-and-set was lost."""
        self._lost_answers += 1

    def appended(self, rows: int) -> None:
        """An append of so many updates is durable."""
        self._appends += 1
        self._rows += rows

    def stalled(self) -> None:
        """A wait was so long that it was logged."""
        self._stalls += 1

    def heartbeat(self, *, late: bool) -> None:
        """A heartbeat succeeded."""
        self._heartbeats += 1
        self._late += late

    def heartbeat_failed(self) -> None:
        """A heartbeat failed, and is repeated."""
        self._failed_heartbeats += 1

    def lease_lost(self) -> None:
        """A heartbeat found no registration to renew."""
        self._lost_leases += 1

    @contextmanager
    def work(self, kind: str) -> Iterator[OngoingWork]:
        """A scope for a piece of long work: `compaction` or `collection`."""
        counts = self._work[kind]
        work, began = OngoingWork(), self.now()
        counts.running += 1
        try:
            yield work
        except Exception:
            counts.failures += 1
            raise
        else:
            if work.done:
                counts.latencies.add(self.now() - began)
        finally:
            counts.running -= 1

    # --- the view --------------------------------------------------------------------------------

    def __call__(self) -> "MetricsView":
        """The current counts as a frozen value with a JSON form. No request."""
        from aiopersist.measure.view import CacheView, HandlesView, LeasesView, MetricsView, QueuesView

        observed, requests = self.observe(), {op: self._request(op) for op in list(self._ops)}
        return MetricsView(
            client=self.name,
            enabled=self.enabled,
            age_s=self.now() - self._began,
            requests=requests,
            commits=self._commits.view(),
            versions=self._versions,
            mismatches=self._mismatches,
            refusals=self._refusals,
            lost_answers=self._lost_answers,
            appends=self._appends,
            rows=self._rows,
            stash=self._stash.view(),
            cache=CacheView(**observed.cache),
            compactions=self._work["compaction"].view(),
            collections=self._work["collection"].view(),
            queues=QueuesView(**observed.queues, **self._transfers()),
            handles=HandlesView(**observed.handles),
            leases=LeasesView(
                heartbeats=self._heartbeats,
                late=self._late,
                failures=self._failed_heartbeats,
                lost=self._lost_leases,
            ),
            stalls=self._stalls,
            failures=observed.failures,
        )

    def _request(self, op: str) -> "RequestsView":
        from aiopersist.measure.view import RequestsView

        counts = self._ops[op]
        return RequestsView(
            count=counts.count,
            errors=counts.errors,
            retries=self._retries[op.partition(".")[2]],
            in_flight=counts.in_flight,
            bytes=counts.bytes,
            duration=counts.latencies.view(),
        )

    def _transfers(self) -> dict[str, int]:
        uploads, downloads = self["blob.set"].in_flight, sum(self[op].in_flight for op in _DOWNLOADS)
        return {"uploads": uploads, "downloads": downloads}


_DOWNLOADS = ("blob.get", "blob.get_range")


class NoMetrics(Metrics):
    """Counts nothing."""

    enabled = False

    def __init__(self, now: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(lambda: 0.0)

    def retried(self, op: str) -> None:
        pass

    def committed(self, began: float, versions: int) -> None:
        pass

    def stash_changed(self, began: float) -> None:
        pass

    def lost_race(self) -> None:
        pass

    def refused(self) -> None:
        pass

    def unanswered(self) -> None:
        pass

    def appended(self, rows: int) -> None:
        pass

    def stalled(self) -> None:
        pass

    def heartbeat(self, *, late: bool) -> None:
        pass

    def heartbeat_failed(self) -> None:
        pass

    def lease_lost(self) -> None:
        pass

    @contextmanager
    def work(self, kind: str) -> Iterator[OngoingWork]:
        yield OngoingWork()
