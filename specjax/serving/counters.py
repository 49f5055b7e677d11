"""The counters of `/metrics`: vLLM's stems under the prefix `specjax:`."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from specjax.text.results import Result, Row


class Counters:
    """What a server counts.

    `unfinished` returns the rows that wait or are decoded, `queued` those that wait.
    """

    def __init__(self, unfinished: Callable[[], int], queued: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"specjax:{name}", what, labels, registry=self.registry)

        def seconds(name: str, what: str) -> Histogram:
            edges = [m * 10.0**e for e in range(-3, 3) for m in (1.0, 2.5, 5.0)]
            return Histogram(f"specjax:{name}", what, buckets=edges, registry=self.registry)

        self.requests = counter("requests", "Answers by route and status.", ("route", "status"))
        self.prompt_tokens = counter("prompt_tokens", "Tokens of prompts.")
        self.cached = counter("prefix_cache_hits", "Tokens of prompts that were not read again.")
        self.generation_tokens = counter("generation_tokens", "Tokens of outputs.")
        self.drafts = counter("spec_decode_num_drafts", "Rounds with a draft.")
        self.draft_tokens = counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self.accepted = counter("spec_decode_num_accepted_tokens", "Accepted drafted tokens.")
        self.by_position = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafted tokens by their place in the draft.",
            ("position",),
        )
        self.first_token = seconds("time_to_first_token_seconds", "From request to first text.")
        self.per_token = seconds("time_per_output_token_seconds", "After the first text.")
        self.whole = seconds("e2e_request_latency_seconds", "From request to the end.")
        for name, what, function in (
            ("num_requests_running", "Rows in slots.", lambda: unfinished() - queued()),
            ("num_requests_waiting", "Rows that wait for a slot.", queued),
        ):
            gauge = Gauge(f"specjax:{name}", what, registry=self.registry)
            gauge.set_function(function)

    def time(self, start: float, first: float, tokens: int) -> None:
        """Counts the times of a finished request; `start`, `first`: when it and its text began."""
        now = time.perf_counter()
        self.first_token.observe(first - start)
        self.whole.observe(now - start)
        if tokens > 1:
            self.per_token.observe((now - first) / (tokens - 1))

    def count(self, rows: list[Row], cached: int) -> None:
        """Counts finished rows; `cached` tokens of their prompts were not read."""
        self.cached.inc(cached)
        result = Result(tuple(rows))
        self.generation_tokens.inc(result.info.emitted)
        drafts = result.acceptance
        self.drafts.inc(drafts.drafts)
        self.draft_tokens.inc(drafts.draft_tokens)
        self.accepted.inc(drafts.accepted_tokens)
        for place in range(len(drafts.drafted_lengths)):
            # A draft with more accepted tokens has one at this place.
            self.by_position.labels(place).inc(sum(drafts.accepted_lengths[place + 1 :]))
