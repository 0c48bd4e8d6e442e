"""Series of ``/metrics``, by the names that dashboards for vLLM use."""

from collections.abc import Iterator
from typing import final

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from jaxinfra.serving.engine.background import EngineThread

_LATENCIES_S = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LENGTHS = tuple(2**n for n in range(0, 21, 2))


@final
class EngineMetrics:
    """Counts of the engine, read when asked for, and histograms of what clients waited.

    Args:
        model: name that clients know, the label of every series.
    """

    def __init__(self, engine: EngineThread, *, model: str):
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine, model))
        # Memory, files and CPU time of this process, by Prometheus's own names.
        prometheus_client.ProcessCollector(registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]):
            made = prometheus_client.Histogram(
                f"vllm:{name}", text, ["model_name"], buckets=buckets, registry=self.registry
            )
            return made.labels(model)

        seconds = "Seconds from a request's arrival to"
        self._first = histogram(
            "time_to_first_token_seconds", f"{seconds} its first token.", _LATENCIES_S
        )
        self._between = histogram(
            "inter_token_latency_seconds", "Seconds between steps with tokens.", _LATENCIES_S
        )
        self._end = histogram("e2e_request_latency_seconds", f"{seconds} its end.", _LATENCIES_S)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", _LENGTHS)
        self._answer = histogram("request_generation_tokens", "Tokens of an answer.", _LENGTHS)

    def first_token(self, seconds: float) -> None:
        """A request has its first token."""
        self._first.observe(seconds)

    def next_token(self, seconds: float) -> None:
        """A request has tokens, so long after those before."""
        self._between.observe(seconds)

    def ended(self, seconds: float, *, prompt_tokens: int, new_tokens: int) -> None:
        """A request has ended."""
        self._end.observe(seconds)
        self._prompt.observe(prompt_tokens)
        self._answer.observe(new_tokens)

    def text(self) -> bytes:
        """All series in the text format."""
        return prometheus_client.generate_latest(self.registry)


@final
class _EngineCollector(Collector):
    def __init__(self, engine: EngineThread, model: str):
        self._thread, self._model = engine, model

    def collect(self) -> Iterator[Metric]:
        engine = self._thread.engine
        scheduler, counts = engine.scheduler, engine.counts
        allocator = scheduler.allocator
        used = allocator.num_held / allocator.num_usable
        for name, text, value in (
            ("num_requests_running", "Requests that have pages.", len(scheduler.running)),
            ("num_requests_waiting", "Requests that wait for pages.", len(scheduler.waiting)),
            ("kv_cache_usage_perc", "Share of the pages that requests hold; 1: all.", used),
            ("gpu_cache_usage_perc", "The same by its older name.", used),
        ):
            yield self._gauge(f"vllm:{name}", text, value)
        yield self._gauge(
            "jaxinfra:cached_pages", "Pages kept for prompts to come.", allocator.num_idle
        )
        for name, text, value in (
            ("prompt_tokens", "Tokens of prompts.", counts.prompt_tokens),
            ("generation_tokens", "Tokens drawn.", counts.generated_tokens),
            ("num_preemptions", "Requests that gave up their pages.", scheduler.num_preemptions),
            ("prefix_cache_queries", "Tokens looked up among pages.", counts.prompt_tokens),
            ("prefix_cache_hits", "Tokens found among pages.", counts.cached_tokens),
            ("spec_decode_num_draft_tokens", "Tokens proposed.", counts.drafted_tokens),
            ("spec_decode_num_accepted_tokens", "Of these, accepted.", counts.accepted_tokens),
        ):
            yield self._counter(f"vllm:{name}", text, value)
        host = scheduler.host
        yield self._gauge(
            "jaxinfra:host_pages", "Pages of preempted requests that the host has.", host.num_used
        )
        for name, text, value in (
            ("host_pages_saved", "Pages copied to the host.", host.num_saved),
            ("host_pages_restored", "Pages copied back from the host.", host.num_restored),
            ("steps", "Steps of the engine.", counts.steps),
            (
                "late_compiles",
                "Programs compiled while requests waited.",
                engine.runner.num_late,
            ),
        ):
            yield self._counter(f"jaxinfra:{name}", text, value)
        ended = CounterMetricFamily(
            "vllm:request_success", "Requests ended.", labels=["model_name", "finished_reason"]
        )
        for reason, number in sorted(counts.ended.items()):
            ended.add_metric([self._model, str(reason)], number)
        yield ended

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        metric = GaugeMetricFamily(name, text, labels=["model_name"])
        metric.add_metric([self._model], value)
        return metric

    def _counter(self, name: str, text: str, value: float) -> Metric:
        metric = CounterMetricFamily(name, text, labels=["model_name"])
        metric.add_metric([self._model], value)
        return metric
