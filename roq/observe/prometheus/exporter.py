"""``roq metrics``: a run's metrics for Prometheus. docs/metrics.md lists them.

Counters and histograms count while this process runs: it follows the event stream and adds up the workers'
reports. Gauges are computed at each scrape. No label is a worker, a group or a version, so the number of time
series is bounded.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, disable_created_metrics, start_http_server

from roq.client import Scheduler
from roq.config import RunConfig
from roq.errors import ConfigError
from roq.events.event import BEGINNING
from roq.events.follow import follow
from roq.observe.prometheus.counters import EventCounters, counter, histogram
from roq.observe.prometheus.gauges import Gauges
from roq.observe.words import worker_info
from roq.types import WorkerStatus

__all__ = ["Exporter"]

LOOK_S = 2.0  # how often worker reports are read
MOST_SWAPS = 1000  # of a worker between two looks; it reports the number itself
OUTCOMES = ("completed", "failed", "cancelled", "fenced", "released")
WHY = ("idle", "blocked", "reserve_wait")


class Exporter:
    """Follows ``run`` at ``url`` and exposes its metrics in :attr:`registry`.

    Args:
        url: the server. run: the run's name. config: its configuration.
    """

    def __init__(self, url: str, run: str, config: RunConfig) -> None:
        self.registry = CollectorRegistry()
        self._sched = Scheduler(url, run, retry_s=None)  # used only by the thread that follows
        self._run = run
        self._workers: dict[str, dict[str, float]] | None = None
        self._looked = 0.0
        self.registry.register(Gauges(url, run, config))
        about = (self.registry, run)
        self._counters = EventCounters(*about)
        self._attempts = counter(*about, "roq_worker_attempts_total", outcome=OUTCOMES)
        self._time = counter(*about, "roq_worker_seconds_total", why=WHY)
        self._loads = counter(*about, "roq_weight_loads_total", how=())
        self._generated = counter(*about, "roq_generated_tokens_total")
        self._swap = histogram(*about, "roq_weight_sync_seconds")

    # -- following --------------------------------------------------------------------------------

    def serve(self, host: str, port: int) -> tuple[Any, threading.Thread]:
        """Serve scrapes in background threads; returns the HTTP server and its thread.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        disable_created_metrics()  # would double the number of series
        try:
            return start_http_server(port, host, registry=self.registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error}; give another --port") from None

    def follow(self, going: Callable[[], bool]) -> None:
        """Count until ``going`` returns False; it is called at least every two seconds.

        Earlier events are read, to know the groups in the run, but not counted.
        """
        after, known = BEGINNING, 0
        with self._sched:
            while page := self._sched.events(after, known=known):
                after, known = page[-1].id, known + sum(event.count for event in page)
                for event in page:
                    self._counters.apply(event)
            self._counters.counting = True
            self._look()

            def still() -> bool:
                self._look()
                return going()

            for page in follow(self._sched, after, known=known, going=still):
                for event in page:
                    self._counters.apply(event)
                if not still():
                    return

    # -- worker reports -----------------------------------------------------------------------------

    def _look(self) -> None:
        """Add the increases of the workers' counters, at most every :data:`LOOK_S` seconds."""
        if time.monotonic() - self._looked >= LOOK_S:
            self._looked = time.monotonic()
            workers = self._sched.status().workers
            said = {worker.worker: _numbers(worker) for worker in workers}
            known = self._workers
            for worker, now in said.items():
                # Counts from before this process started are not added.
                self._add(now if known is None else known.get(worker, {}), now)
            # Workers that left are forgotten: a restarted worker has a new name.
            self._workers = said

    def _add(self, before: dict[str, float], now: dict[str, float]) -> None:
        def risen(name: str) -> float:
            return max(0.0, now.get(name, 0.0) - before.get(name, 0.0))

        for outcome in OUTCOMES:
            self._attempts.labels(self._run, outcome).inc(risen(outcome))
        for why in WHY:
            self._time.labels(self._run, why).inc(risen(f"{why}_s"))
        self._generated.inc(risen("tokens"))
        swaps, received = round(risen("swaps")), round(risen("received"))
        self._loads.labels(self._run, "received").inc(received)
        self._loads.labels(self._run, "read").inc(max(0, swaps - received))
        for _ in range(min(swaps, MOST_SWAPS)):
            self._swap.observe(risen("swap_s") / swaps)


def _numbers(worker: WorkerStatus) -> dict[str, float]:
    return {k: float(v) for k, v in worker_info(worker).items() if isinstance(v, int | float)}
