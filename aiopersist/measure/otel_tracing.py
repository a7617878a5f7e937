"""Spans by OpenTelemetry. Only `providers` imports this, once a tracer provider is set.

A failed span has only the name of the error's type: the text may contain values of users, or a secret. Only
the trace context goes to other processes, no baggage.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from contextvars import Context, copy_context
from typing import TypeVar

from opentelemetry import context as contexts
from opentelemetry import trace
from opentelemetry.trace import Link, Span, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from aiopersist.measure.tracing import Tracing

T = TypeVar("T")

LINKS_MAX = 32  # callers of one group besides the first: more links help little, and cost memory
_LINKS = contexts.create_key("aiopersist-links")
_PROPAGATOR = TraceContextTextMapPropagator()


def injected() -> dict[str, str]:
    """The present trace as text, for another process; empty if there is none."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier)
    return carrier


class OtelTracing(Tracing):
    """See the header."""

    on = True

    def __init__(self) -> None:
        self._tracer = trace.get_tracer("aiopersist")

    @contextmanager
    def span(self, name: str, shard: str = "", *carriers: Mapping[str, str]) -> Iterator[None]:
        span = self._begun(name, shard, carriers)
        try:
            with _within(span):
                yield
        finally:
            span.end()

    async def iteration(
        self, name: str, shard: str, items: AsyncGenerator[T, None], *carriers: Mapping[str, str]
    ) -> AsyncGenerator[T, None]:
        span = self._begun(name, shard, carriers)
        try:
            async with aclosing(items):
                while True:
                    with _within(span):  # each step may run in a task of its own
                        try:
                            item = await anext(items)
                        except StopAsyncIteration:
                            return
                    yield item
        finally:
            span.end()

    async def request(self, op: str, request: Callable[[], Awaitable[T]]) -> T:
        if not trace.get_current_span().is_recording():
            return await request()
        span = self._tracer.start_span(
            f"aiopersist.{op}", kind=SpanKind.CLIENT, attributes={"aiopersist.operation": op}
        )
        try:
            with _within(span):
                return await request()
        finally:
            span.end()

    def origin(self) -> Span | None:
        span = trace.get_current_span()
        return span if span.get_span_context().is_valid else None

    @contextmanager
    def group(self, origins: Iterable[Span | None]) -> Iterator[None]:
        context, spans = contexts.Context(), list(dict.fromkeys(span for span in origins if span is not None))
        if spans:
            context = trace.set_span_in_context(spans[0], context)
        links = [Link(span.get_span_context()) for span in spans[1 : LINKS_MAX + 1]]
        token = contexts.attach(contexts.set_value(_LINKS, links, context))
        try:
            yield
        finally:
            contexts.detach(token)

    def background_context(self) -> Context:
        context = copy_context()
        context.run(contexts.attach, contexts.Context())
        return context

    def _begun(self, name: str, shard: str, carriers: Iterable[Mapping[str, str]]) -> Span:
        context = contexts.get_current()
        present = contexts.get_value(_LINKS, context)
        links = list(present) if isinstance(present, list) else []
        for carrier in carriers:
            remote = trace.get_current_span(_PROPAGATOR.extract(carrier, contexts.Context()))
            if not remote.get_span_context().is_valid:
                continue
            if trace.get_current_span(context).get_span_context().is_valid:
                links.append(Link(remote.get_span_context()))
            else:
                context = trace.set_span_in_context(remote, context)
        attributes = {"aiopersist.shard.name": shard} if shard else {}
        return self._tracer.start_span(f"aiopersist.{name}", context, links=links, attributes=attributes)


@contextmanager
def _within(span: Span) -> Iterator[None]:
    """Make `span` the present one, and mark it as failed by an error. A cancellation is no failure."""
    context = contexts.set_value(_LINKS, None, trace.set_span_in_context(span))
    token = contexts.attach(context)
    try:
        yield
    except Exception as error:
        span.set_attribute("error.type", type(error).__qualname__)
        span.set_status(StatusCode.ERROR)
        raise
    finally:
        contexts.detach(token)
