"""``roq metrics``: a run's figures for Prometheus. docs/metrics.md lists them.

Counters and histograms count what happens while this process runs: it follows the event stream, and adds
up what the workers say of themselves. Gauges are looked up when they are scraped. No label names a worker,
a group or a version, so the number of time series is bounded whatever a run does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    start_http_server,
)

from roq.client import Scheduler
from roq.config import RunConfig
from roq.errors import ConfigError
from roq.events.event import BEGINNING, Event
from roq.events.fields import EVENTS
from roq.events.follow import follow
from roq.events.replay import ENDS, Replay
from roq.observe.display import worker_info
from roq.observe.prometheus.gauges import Gauges
from roq.observe.prometheus.metrics import HELP
from roq.types import WorkerStatus

__all__ = ["Exporter"]

LOOK_S = 2.0  # how often workers are looked at
REASONS = ("zero_variance", "surplus", "stuck_timeout", "other")
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000, 3000)
TOKENS = tuple(2**n for n in range(4, 18))
VERSIONS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64)


class Exporter:
    """Follows ``run`` at ``url`` and holds its figures in :attr:`registry`.

    Args:
        url: the server. run: the run's name. config: its configuration.
    """

    def __init__(self, url: str, run: str, config: RunConfig) -> None:
        self.registry = CollectorRegistry()
        self._sched = Scheduler(url, run, retry_s=None)  # of the thread that follows
        self._run, self._config = run, config
        self._replay = Replay()
        self._workers: dict[str, dict[str, float]] | None = None
        self._looked = 0.0
        self._published: float | None = None
        self.registry.register(Gauges(url, run, config))

        def counter(name: str, *labels: str) -> Counter:
            return Counter(name, HELP[name], ("run", *labels), registry=self.registry)

        def histogram(name: str, buckets: tuple[float, ...]) -> Any:
            made = Histogram(name, HELP[name], ("run",), buckets=buckets, registry=self.registry)
            return made.labels(run)

        self._events = counter("roq_events_total", "event")
        self._missed = counter("roq_missed_events_total").labels(run)
        self._moves = counter("roq_moves_total").labels(run)
        self._releases = counter("roq_releases_total", "reason")
        self._removed = counter("roq_removed_groups_total", "fate", "reason")
        self._removed_tokens = counter("roq_removed_tokens_total", "fate")
        self._trained_tokens = counter("roq_trained_tokens_total").labels(run)
        self._staleness = histogram("roq_staleness_versions", VERSIONS)
        self._queue_wait = histogram("roq_queue_wait_seconds", SECONDS)
        self._rollout = histogram("roq_rollout_seconds", SECONDS)
        self._response = histogram("roq_response_tokens", TOKENS)
        self._train = histogram("roq_train_seconds", SECONDS)
        self._trainer_wait = histogram("roq_trainer_wait_seconds", SECONDS)
        self._swap = histogram("roq_weight_sync_seconds", SECONDS)
        self._attempts = counter("roq_worker_attempts_total", "outcome")
        self._loads = counter("roq_weight_loads_total", "how")
        self._generated = counter("roq_generated_tokens_total").labels(run)
        self._time = counter("roq_worker_seconds_total", "why")
        for event in (*EVENTS, "other"):  # what a newer library adds counts as the latter
            self._events.labels(run, event)
        for reason in ("error", "detach", "left", "lease_expired"):
            self._releases.labels(run, reason)
        for fate in ENDS:
            self._removed_tokens.labels(run, fate)
        for outcome in ("completed", "failed", "cancelled", "fenced", "released"):
            self._attempts.labels(run, outcome)
        for why in ("idle", "blocked", "reserve_wait"):
            self._time.labels(run, why)

    # -- following --------------------------------------------------------------------------------

    def serve(self, host: str, port: int) -> tuple[Any, threading.Thread]:
        """Answer scrapes in threads of their own; returns the HTTP server and its thread.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        disable_created_metrics()  # twice the series, and nobody's question
        try:
            return start_http_server(port, host, registry=self.registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}; give another --port") from None

    def follow(self, going: Callable[[], bool]) -> None:
        """Count what happens until ``going`` says no, asked at least every two seconds.

        What happened before is read, to know the groups that are under way, but not counted.
        """
        after, known = BEGINNING, 0
        with self._sched:
            while page := self._sched.events(after, known=known):
                after, known = page[-1].id, known + sum(event.count for event in page)
                for event in page:
                    self._note(event)
            self._look()

            def still() -> bool:
                self._look()
                return going()

            for page in follow(self._sched, after, known=known, going=still):
                for event in page:
                    self._count(event)
                if not still():
                    return

    def _note(self, event: Event) -> None:
        """Keep up with the groups in the slots, and with those alone."""
        if event.name == "gap":  # what left unseen must not stay for ever
            self._replay = Replay()
        self._replay.feed(event)
        gone = event.get("groups").split() if event.name == "take" else ()
        if event.name in ENDS:
            gone = (event.get("group"),)
        self._replay.forget(int(number) for number in gone)
        if event.name == "take":
            self._replay.batches.clear()
        if event.name in ("take", "publish"):
            self._published = event.time

    def _count(self, event: Event) -> None:
        run, group = self._run, self._replay.groups.get(event.number("group"))
        self._events.labels(run, event.name if event.name in EVENTS else "other").inc()
        self._moves.inc(len(event.moves))
        since = None if self._published is None else max(0.0, event.time - self._published)
        match event.name:
            case "gap":
                self._missed.inc(event.number("missing"))
            case "complete":
                self._response.observe(event.number("tokens"))
                member = None if group is None else group.members.get(event.number("member"))
                if member is not None and member.issued is not None:
                    self._rollout.observe(event.time - member.issued)
            case "release" | "expired":
                self._releases.labels(run, _release_reason(event)).inc()
            case "requeued" | "discarded" | "filtered" | "dead":
                reason = event.get("reason")
                reason = reason if reason in REASONS else "other"
                self._removed.labels(run, event.name, reason).inc()
                self._removed_tokens.labels(run, event.name).inc(0 if group is None else group.tokens)
            case "take":
                self._count_batch(event)
                if since is not None:
                    self._trainer_wait.observe(since)
            case "publish" if since is not None:
                self._train.observe(since)
            case _:
                pass
        self._note(event)

    def _count_batch(self, event: Event) -> None:
        for number in event.get("groups").split():
            group = self._replay.groups.get(int(number))
            if group is not None:
                self._staleness.observe(event.number("version") - group.v_traj)
                self._trained_tokens.inc(group.tokens)
                if group.occupied is not None:
                    self._queue_wait.observe(event.time - group.occupied)

    # -- what the workers say -----------------------------------------------------------------------

    def _look(self) -> None:
        """Add what the workers' own counters rose by, now and then."""
        if time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            workers = self._sched.status().workers
            said = {worker.worker: _numbers(worker) for worker in workers}
            known = self._workers
            for worker, now in said.items():
                # On the first look, what they counted before this process began is not ours to count.
                self._add(now if known is None else known.get(worker, {}), now)
            # One that left is forgotten: should it come back, it is a new process with a new name.
            self._workers = said

    def _add(self, before: dict[str, float], now: dict[str, float]) -> None:
        def risen(name: str) -> float:
            return max(0.0, now.get(name, 0.0) - before.get(name, 0.0))

        for outcome in ("completed", "failed", "cancelled", "fenced", "released"):
            self._attempts.labels(self._run, outcome).inc(risen(outcome))
        for why in ("idle", "blocked", "reserve_wait"):
            self._time.labels(self._run, why).inc(risen(f"{why}_s"))
        self._generated.inc(risen("tokens"))
        swaps, received = round(risen("swaps")), round(risen("received"))
        self._loads.labels(self._run, "received").inc(received)
        self._loads.labels(self._run, "read").inc(max(0, swaps - received))
        for _ in range(swaps):
            self._swap.observe(risen("swap_s") / swaps)


def _release_reason(event: Event) -> str:
    if event.name == "expired":
        return "lease_expired"
    if event.number("failed"):
        return "error"
    return "detach" if event.get("reason") else "left"


def _numbers(worker: WorkerStatus) -> dict[str, float]:
    return {k: float(v) for k, v in worker_info(worker).items() if isinstance(v, int | float)}
