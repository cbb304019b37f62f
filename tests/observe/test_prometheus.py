"""Figures scraped by HTTP from a run that goes on; their names are the documented ones."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from roq import Scheduler
from roq.events.fields import EVENTS
from roq.observe.prometheus.metrics import METRICS
from roq.protocol import library
from roq.protocol.keys import keys_of
from roq.run.embedded_server import EmbeddedServer
from tests.conftest import environment
from tests.protocol.play import Named, trajectory

Scrape = Callable[[], list[Any]]


@pytest.fixture
def scrape(example: Named) -> Iterator[Scrape]:
    """``roq metrics`` in a process of its own; each call is one scrape."""
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # not ignored
    code += "from roq.cli import main; main(prog_name='roq')"
    command = [sys.executable, "-c", code, "metrics", "--port", "0"]
    command += ["--redis", example.sched.url, "--run", example.sched.run]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
    assert process.stderr is not None
    said = process.stderr.readline()
    address = said.split()[-1]
    assert address.startswith("http://127.0.0.1:"), said + process.stderr.read()

    def once() -> list[Any]:
        with urllib.request.urlopen(address, timeout=10) as answer:
            return list(text_string_to_metric_families(answer.read().decode()))

    yield once
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0
    process.stderr.close()


def value(families: list[Any], name: str, **labels: str) -> float:
    found = [s for s in samples(families) if s.name == name and labels.items() <= s.labels.items()]
    assert len(found) == 1, (name, labels, found)
    return found[0].value


def samples(families: list[Any]) -> list[Sample]:
    return [sample for family in families for sample in family.samples]


def settled(scrape: Scrape, true: Callable[[list[Any]], bool]) -> list[Any]:
    deadline = time.monotonic() + 10
    while not true(families := scrape()):
        assert time.monotonic() < deadline, "the figures did not come within 10 s"
        time.sleep(0.1)
    return families


def test_a_run_in_figures(example: Named, scrape: Scrape) -> None:
    sched = example.sched
    families = settled(scrape, lambda f: value(f, "roq_version") == 1)
    assert value(families, "roq_slots", state="occupied") == 3
    assert value(families, "roq_slots", state="reserved") == 5
    assert value(families, "roq_buffers", state="FULL") == 2
    assert value(families, "roq_prompts", where="trained") == 4
    assert value(families, "roq_workers", does="generating") == 1
    assert value(families, "roq_step_reward_mean") == 0.5
    assert value(families, "roq_server_call_seconds_count", command="fcall") > 10
    assert value(families, "roq_events_total", event="occupy") == 0  # what was before is not counted
    time.sleep(2.5)  # the worker was looked at

    example.complete("H")
    sched.complete(example.claims["B"][0], trajectory(0, tokens=100))
    assert example.take() == "FGHB"
    sched.drop(example.group("K"), "by hand")
    grown = {"doing": "waiting: window_full", "tokens": 500, "completed": 5, "idle_s": 1.5}
    sched.renew("w0", 1, {**grown, "swaps": 2, "swap_s": 3.0})
    sched.release(example.claims["L"][0])
    sched.fail(example.claims["I"][0], "no such tool")

    families = settled(scrape, lambda f: value(f, "roq_worker_attempts_total", outcome="completed") == 5)
    assert value(families, "roq_events_total", event="complete") == 2
    assert value(families, "roq_staleness_versions_count") == 4
    assert value(families, "roq_staleness_versions_bucket", le="0.0") == 0
    assert value(families, "roq_staleness_versions_bucket", le="1.0") == 4
    assert value(families, "roq_trained_tokens_total") == 2 + 2 + 2 + 100
    assert value(families, "roq_queue_wait_seconds_count") == 4
    assert value(families, "roq_rollout_seconds_count") == 2
    assert value(families, "roq_response_tokens_sum") == 102
    assert value(families, "roq_trainer_wait_seconds_count") == 1
    assert value(families, "roq_train_seconds_count") == 0
    assert value(families, "roq_removed_groups_total", fate="requeued", reason="other") == 1
    assert value(families, "roq_releases_total", reason="detach") == 1
    assert value(families, "roq_releases_total", reason="error") == 1
    assert value(families, "roq_slots", state="training") == 4
    assert value(families, "roq_workers", does="waiting") == 1
    assert value(families, "roq_generated_tokens_total") == 500
    assert value(families, "roq_worker_seconds_total", why="idle") == 1.5
    assert value(families, "roq_weight_sync_seconds_count") == 2
    assert value(families, "roq_weight_sync_seconds_sum") == 3
    sched.publish(2, "weights/2", "t0", {"reward/mean": 0.75})
    families = settled(scrape, lambda f: value(f, "roq_train_seconds_count") == 1)
    assert value(families, "roq_step_reward_mean") == 0.75


def test_names_kinds_and_labels_are_the_table_s(example: Named, scrape: Scrape) -> None:
    figures = {"loss": 1.0, "grad_norm": 1, "mismatch_kl": 0, "clip_fraction": 0, "response_length/mean": 2}
    example.complete("H")
    example.complete("B")
    example.take()
    figures |= {"reward/mean": 1, "staleness/mean": 0, "staleness/max": 0}
    example.sched.publish(2, "w", "t0", figures)
    families = settled(scrape, lambda f: value(f, "roq_version") == 2)
    removed = next(metric for metric in METRICS if metric.name == "roq_removed_groups_total")
    told = {family.name: family for family in families}
    for metric in METRICS:
        family = told.pop(metric.name.removesuffix("_total"))
        assert family.type == metric.kind, metric
        assert family.documentation == metric.text
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == {"run", *metric.labels}, metric
        assert family.samples or metric is removed, metric
    assert not told


def test_every_event_of_the_library_is_known() -> None:
    written = set(re.findall(r'events\.log\(run, "(\w+)"', library.source()))
    assert len(written) > 15
    assert written <= set(EVENTS)


def test_a_server_that_is_away(example: Named, scrape: Scrape, url: str) -> None:
    scrape()
    server = EmbeddedServer(Path(url.removeprefix("unix://")).parent.parent)
    server.stop()
    assert [(s.name, s.value) for s in samples(scrape()) if s.name == "roq_up"] == [("roq_up", 0)]
    server.start()
    settled(scrape, lambda f: value(f, "roq_up") == 1)
    with Scheduler(url, "demo") as sched:
        sched.pause()
    settled(scrape, lambda f: value(f, "roq_events_total", event="paused") == 1)


def test_what_a_worker_forges_does_not_end_the_exporter(example: Named, scrape: Scrape) -> None:
    sched = example.sched
    settled(scrape, lambda f: value(f, "roq_version") == 1)
    time.sleep(2.5)  # the worker was looked at
    with redis.Redis.from_url(sched.url) as client:
        for fields in (
            {"foo": "bar"},
            {"event": "publish", "metrics": "nope"},
            {b"\xff": "x", "event": "paused"},
        ):
            client.xadd(keys_of(sched.run)["events"], fields)
    sched.renew("w0", 1, {"swaps": 10**15, "tokens": 10**400, "completed": 4})
    families = settled(scrape, lambda f: value(f, "roq_worker_attempts_total", outcome="completed") == 4)
    assert value(families, "roq_events_total", event="other") == 3
    assert value(families, "roq_generated_tokens_total") == 0
