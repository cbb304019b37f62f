"""The gauges of ``roq metrics``, computed at each scrape."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from roq.client import Scheduler
from roq.config import RunConfig
from roq.errors import RoqError, ServerUnavailable
from roq.events.event import Event
from roq.observe.prometheus.metrics import FIGURES, HELP
from roq.observe.words import tokens_per_s, worker_info
from roq.types import Status, WorkerStatus

__all__ = ["Gauges"]

log = logging.getLogger("roq")

SCRAPE_S = 2.0  # how long a scrape waits for an unreachable server
# upper bounds of the server's own latency buckets, in microseconds
CALL_MICROS = (16, 33, 66, 132, 264, 528, 1056, 2113, 4227, 8454, 16908, 33816, 67633, 135266, 270532, 541065)
DOES = ("generating", "waiting", "loading", "draining", "starting", "lost")
BEHIND = ("0", "1", "2+")
STATES = ("PENDING", "FULL", "READY", "TRAINING")


class Gauges(Collector):
    """Collects a run's gauges for a registry."""

    def __init__(self, url: str, run: str, config: RunConfig) -> None:
        self._sched = Scheduler(url, run, retry_s=SCRAPE_S)
        self._run, self._config = run, config
        self._lock = threading.Lock()
        self._no_latency = url.partition("://")[0].endswith("+cluster")  # each node has its own

    def describe(self) -> Iterator[Any]:
        """Yield nothing, so that registering does not call the server."""
        yield from ()

    def collect(self) -> Iterator[Any]:
        """Yield the current gauges; only ``roq_up`` 0 if the server is unreachable."""
        with self._lock:
            try:
                status, step = self._sched.status(), self._sched.newest_event("publish")
                families = [*self._status(status), *self._workers(status), *self._step(step), *self._calls()]
            except RoqError as error:
                log.warning("scrape failed: %s", error)
                yield self._gauge("roq_up", 0)
                return
        yield self._gauge("roq_up", 1)
        yield from families

    def _gauge(self, name: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, HELP[name], labels=["run"])
        family.add_metric([self._run], float(value))
        return family

    def _labelled(self, name: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, HELP[name], labels=["run", label])
        for key, value in values.items():
            family.add_metric([self._run, key], float(value))
        return family

    def _status(self, status: Status) -> Iterator[GaugeMetricFamily]:
        buffers = [buffer for buffer in status.buffers if buffer.state != "TRAINING"]
        training = sum(buffer.occupied for buffer in status.buffers if buffer.state == "TRAINING")
        slots = {
            "occupied": sum(buffer.occupied for buffer in buffers),
            "reserved": sum(buffer.reserved for buffer in buffers),
            "empty": sum(buffer.empty for buffer in buffers),
            "training": training,
        }
        yield self._labelled("roq_slots", "state", slots)
        states = Counter(buffer.state for buffer in status.buffers)
        yield self._labelled("roq_buffers", "state", {state: states[state] for state in STATES})
        ledger = {name: getattr(status.ledger, name) for name in status.ledger.__struct_fields__}
        yield self._gauge("roq_prompts_issued", ledger.pop("issued"))
        yield self._labelled("roq_prompts", "where", ledger)
        yield self._gauge("roq_version", status.version)
        yield self._gauge("roq_checkpoint_version", status.checkpoint)
        yield self._gauge("roq_eta", self._config.eta)
        yield self._gauge("roq_inflight_trajectories", status.inflight)
        yield self._gauge("roq_pending_trajectories", status.pending)
        yield self._gauge("roq_payload_bytes", status.payload_bytes)
        yield self._gauge("roq_paused", status.paused)
        yield self._gauge("roq_ended", status.ended)
        oldest = max((slot.age_s for slot in status.waiting), default=0.0)
        waits = status.training is None and not status.ended
        yield self._gauge("roq_trainer_waits", waits)
        yield self._gauge("roq_oldest_wait_seconds", oldest)
        if status.trainer_seen_s is not None:
            yield self._gauge("roq_trainer_seen_seconds", status.trainer_seen_s)

    def _workers(self, status: Status) -> Iterator[GaugeMetricFamily]:
        does: dict[str, int] = dict.fromkeys(DOES, 0)
        behind: dict[str, int] = dict.fromkeys(BEHIND, 0)
        for worker in status.workers:
            does[_does(worker)] += 1
            if worker.version is not None and worker.lease_left_s > 0:
                lag = status.version - worker.version
                behind[str(lag) if lag < 2 else "2+"] += 1
        yield self._labelled("roq_workers", "does", does)
        yield self._labelled("roq_workers_behind", "versions", behind)
        speed = tokens_per_s(status.workers)
        yield self._gauge("roq_generation_tokens_per_second", speed)

    def _step(self, step: Event | None) -> Iterator[GaugeMetricFamily]:
        figures = {} if step is None else step.metrics
        for figure, name in FIGURES.items():
            if figure in figures:
                yield self._gauge(name, figures[figure])

    def _calls(self) -> Iterator[HistogramMetricFamily]:
        """Yield the server's latency histogram of functions, if this user may read it."""
        if self._no_latency:
            return
        try:
            stats = self._sched.call_stats()
        except ServerUnavailable:
            raise
        except RoqError as error:  # this user may not run the command, or the server lacks it
            self._no_latency = True
            log.warning("roq_server_call_seconds is not available: %s", error)
            return
        name = "roq_server_call_seconds"
        family = HistogramMetricFamily(name, HELP[name], labels=["run", "command"])
        for command, stat in stats.items():
            buckets: list[tuple[str, float]] = []
            for micros in CALL_MICROS:
                within = [count for seconds, count in stat.histogram if seconds <= micros / 1e6]
                buckets.append((str(micros / 1e6), float(max(within, default=0))))
            buckets.append(("+Inf", float(stat.calls)))
            family.add_metric([self._run, command], buckets=buckets, sum_value=stat.seconds)
        yield family


def _does(worker: WorkerStatus) -> str:
    if worker.lease_left_s <= 0:
        return "lost"
    if worker.draining:
        return "draining"
    doing = str(worker_info(worker).get("doing", "")).split(":")[0].split(" ")[0]
    return doing if doing in ("generating", "waiting", "loading") else "starting"
