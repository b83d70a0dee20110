"""Spans to an OpenTelemetry collector over OTLP/HTTP; the only place that imports OpenTelemetry.

    record ─► bounded queue ─► a thread: SDK spans, in batches, retries ─► POST /v1/traces

Sampler, queue, resource, headers, TLS, compression, batches and timeouts are the SDK's and obey its variables. When the queue
is full, the oldest spans are dropped. What the collector does not take is counted, and named in the log once a minute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

import anyio
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.trace.span import TraceState

from common.protocol.trace_context import span_id_of, trace_id_of, traceparent
from common.runtime import logs
from common.runtime.metrics import Metrics
from common.runtime.spans import Begun, Span
from common.runtime.version import version

log = logs.get("tracing")

FLUSH_S = 1.5
"""What the last spans get to reach the collector once the process has nothing else to do."""
WARN_EVERY_S = 60.0
BATCH_SIZE, BATCH_SPANS = "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 128
"""By default a quarter of the SDK's: to encode a batch keeps the interpreter from the event loop, some 20 µs a span."""
_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_ANY = SpanContext(1, 1, False, _SAMPLED)


class OtlpTracing:
    """`environ`: where OpenTelemetry's variables are; the SDK reads them from the process's own."""

    enabled = True

    def __init__(self, *, role: str, worker: str, metrics: Metrics, environ: Mapping[str, str]) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # a line for each failed request; see _Exporter
        self._made = metrics.counter("trace_spans_total", "Spans of sampled requests that ended here")
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        self._ids = RandomIdGenerator()
        self._propagator = TraceContextTextMapPropagator()
        exporter = _Exporter(OTLPSpanExporter(), _resource(role, worker, environ), metrics)
        batch = None if environ.get(BATCH_SIZE, "").strip() else BATCH_SPANS
        self._processor: SpanProcessor = BatchSpanProcessor(exporter, max_export_batch_size=batch)

    def begin(self, traceparent: str, tracestate: str) -> Begun | None:
        carrier = {"traceparent": traceparent, "tracestate": tracestate} if traceparent else {}
        context = self._propagator.extract(carrier, context=Context())
        client = get_current_span(context).get_span_context()
        trace = client.trace_id if client.is_valid else self._ids.generate_trace_id()
        sampled = self._sampler.should_sample(context if client.is_valid else None, trace, "request", SpanKind.SERVER)
        if not sampled.decision.is_sampled():
            return None
        state = sampled.trace_state.to_header() if sampled.trace_state else ""
        own = self._ids.generate_span_id()
        return Begun(_text(trace, own), _text(trace, client.span_id) if client.is_valid else "", state)

    def record(self, spans: Iterable[Span], now: float) -> None:
        # one offset for all, so that spans of a request agree to the nanosecond on where they meet
        offset_s = time.time() - now
        count = 0
        for span in spans:
            count += 1
            self._processor.on_end(_Waiting(span, offset_s))
        self._made.inc(count)

    async def close(self) -> None:
        with anyio.move_on_after(FLUSH_S, shield=True) as scope:
            await anyio.to_thread.run_sync(self._processor.shutdown, abandon_on_cancel=True)
        if scope.cancelled_caught:
            log.warning("traces_lost", reason=f"the collector did not take the last spans within {FLUSH_S} s")


class _Waiting(ReadableSpan):
    """One of our spans in the SDK's queue. The SDK's own span costs fifty times as much, and is made by the thread that exports
    it. `offset_s`: what makes its times seconds since 1970."""

    def __init__(self, span: Span, offset_s: float) -> None:
        # not the base's, which would look for a resource; the queue asks whether it is sampled, and nothing else
        self._context = _ANY
        self.span = span
        self.offset_s = offset_s


class _ChosenIds(IdGenerator):
    """Ids that a span has already where others know them; random ones otherwise."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self.next_trace = self.next_span = 0

    def generate_trace_id(self) -> int:
        return self.next_trace or self._random.generate_trace_id()

    def generate_span_id(self) -> int:
        return self.next_span or self._random.generate_span_id()


class _Exporter(SpanExporter):
    """Makes the SDK's spans of what waited, hands them to `exporter`, and counts what that could send. Called by one thread."""

    def __init__(self, exporter: SpanExporter, resource: Resource, metrics: Metrics) -> None:
        self._exporter = exporter
        self._ids = _ChosenIds()
        # what is exported has been sampled already
        provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, id_generator=self._ids, shutdown_on_exit=False)
        self._tracer = provider.get_tracer("penstock", version())
        spans = metrics.counter("trace_exports_total", "Spans sent to the collector, by outcome", ["outcome"])
        self._exported, self._failed = spans.labels("exported"), spans.labels("failed")
        self._warned_at = 0.0
        self._num_failed = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export([self._made_of(each) for each in spans if isinstance(each, _Waiting)])
        except Exception as error:  # the thread must live
            log.debug("traces_not_exported", error=type(error).__name__)
            result = SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            self._exported.inc(len(spans))
        else:
            self._failed.inc(len(spans))
            self._warn(len(spans))
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def _made_of(self, waiting: _Waiting) -> ReadableSpan:
        span, offset_s = waiting.span, waiting.offset_s
        self._ids.next_trace, self._ids.next_span = _numbers(span.own) if span.own else (0, 0)
        began_ns, ended_ns = int((span.began_at + offset_s) * 1e9), int((span.ended_at + offset_s) * 1e9)
        facts = {**span.facts, "error.type": span.error} if span.error else span.facts
        made = self._tracer.start_span(
            span.name, context=_context(span), kind=_KINDS[span.kind], attributes=facts, start_time=began_ns
        )
        if span.error:
            made.set_status(Status(StatusCode.ERROR))
        made.end(ended_ns)
        assert isinstance(made, ReadableSpan)
        time.sleep(0)  # lets go of the GIL between spans: the event loop runs in another thread
        return made

    def _warn(self, num_spans: int) -> None:
        self._num_failed += num_spans
        now = time.monotonic()
        if not self._warned_at or now - self._warned_at >= WARN_EVERY_S:
            self._warned_at = now
            log.warning("traces_not_exported", spans=self._num_failed, reason="the collector did not take them")
            self._num_failed = 0


def _resource(role: str, worker: str, environ: Mapping[str, str]) -> Resource:
    """Whose spans these are: what the variables say, and what they leave open."""
    facts = {
        "service.namespace": "penstock",
        "service.version": version(),
        "service.instance.id": worker,
        "penstock.role": role,
    }
    given = environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if not environ.get("OTEL_SERVICE_NAME", "").strip() and "service.name=" not in given:
        facts["service.name"] = f"penstock-{role}"
    return Resource.create({name: value for name, value in facts.items() if f"{name}=" not in given})


def _context(span: Span) -> Context:
    """The context in which a span begins: its parent's."""
    if not span.parent:
        return Context()
    trace, number = _numbers(span.parent)
    state = TraceState.from_header([span.state]) if span.state else TraceState()
    return set_span_in_context(NonRecordingSpan(SpanContext(trace, number, True, _SAMPLED, state)), Context())


def _numbers(parent: str) -> tuple[int, int]:
    return int(trace_id_of(parent), 16), int(span_id_of(parent), 16)


def _text(trace: int, span: int) -> str:
    return traceparent(f"{trace:032x}", f"{span:016x}")
