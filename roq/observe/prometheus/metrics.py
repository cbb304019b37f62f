"""The metrics of ``roq metrics``, the source for the code, docs/metrics.md, Grafana and the tests."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["FIGURES", "HELP", "METRICS", "Metric"]


class Metric(NamedTuple):
    """A metric: its labels besides ``run``, its help text, and its name in ``publish`` if it has one."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: tuple[str, ...]
    text: str
    published: str = ""


def _counter(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "counter", labels, text)


def _gauge(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "gauge", labels, text)


def _step(name: str, published: str, text: str) -> Metric:
    return Metric(name, "gauge", (), text, published)


def _histogram(name: str, text: str, *labels: str) -> Metric:
    return Metric(name, "histogram", labels, text)


METRICS = (
    # the run's state
    _gauge("roq_up", "1 if the server answered this scrape, else 0 and no other gauges"),
    _gauge("roq_version", "Newest published weights version"),
    _gauge("roq_checkpoint_version", "Version before which batches are dropped: the oldest kept checkpoint"),
    _gauge("roq_eta", "The run's maximum staleness"),
    _gauge("roq_paused", "Whether admission is paused"),
    _gauge("roq_ended", "Whether the run has ended"),
    _gauge(
        "roq_slots",
        "Slots in the window, and groups in training: occupied, reserved, empty, training",
        "state",
    ),
    _gauge("roq_buffers", "Buffers: PENDING, FULL, READY, TRAINING", "state"),
    _gauge("roq_prompts_issued", "Prompts issued"),
    _gauge("roq_prompts", "By state: trained, in_slots, requeued, filtered, discarded, dead", "where"),
    _gauge("roq_inflight_trajectories", "Trajectories in flight"),
    _gauge("roq_pending_trajectories", "Trajectories waiting to be issued again"),
    _gauge("roq_payload_bytes", "Trajectory data in Redis"),
    # the trainer
    _gauge("roq_trainer_waits", "Whether the trainer is waiting for a batch"),
    _gauge("roq_trainer_seen_seconds", "Seconds since the trainer's last call; absent before it joins"),
    _gauge("roq_oldest_wait_seconds", "Age of the oldest unfinished group of the nearest buffer"),
    _histogram("roq_train_seconds", "Seconds from take to publish"),
    _histogram("roq_trainer_wait_seconds", "Seconds from publish, or the trainer's start if later, to take"),
    _histogram("roq_staleness_versions", "Staleness of each group when taken"),
    _counter("roq_trained_tokens_total", "Response tokens taken for training"),
    _step("roq_step_reward_mean", "reward/mean", "Mean reward of the newest published step's batch"),
    _step("roq_step_staleness_mean", "staleness/mean", "Mean staleness of its trajectories"),
    _step("roq_step_staleness_max", "staleness/max", "Greatest staleness of its trajectories"),
    _step(
        "roq_step_response_tokens_mean", "response_length/mean", "Mean response length of its trajectories"
    ),
    _step("roq_step_mismatch_kl", "mismatch_kl", "k3 estimate between engine and trainer, nats per token"),
    _step("roq_step_loss", "loss", "Its loss"),
    _step("roq_step_grad_norm", "grad_norm", "Its gradient norm"),
    _step("roq_step_clip_fraction", "clip_fraction", "Share of its tokens with a clipped ratio"),
    # transitions
    _counter("roq_events_total", "Transitions by the event they wrote; unknown ones as other", "event"),
    _counter("roq_missed_events_total", "Events that were trimmed before this process read them"),
    _counter("roq_moves_total", "Groups moved to another slot by another group's transition"),
    _counter("roq_releases_total", "Claims released or lost: detach, error, left, lease_expired", "reason"),
    _counter(
        "roq_removed_groups_total",
        "Groups that left untrained; reason: zero_variance, surplus, stuck_timeout, other",
        "fate",
        "reason",
    ),
    _counter("roq_removed_tokens_total", "Finished response tokens of such groups", "fate"),
    _histogram("roq_queue_wait_seconds", "Seconds from Occupied to taken, for each group"),
    _histogram("roq_rollout_seconds", "Seconds from issue to completion, for each trajectory"),
    _histogram("roq_response_tokens", "Length of each completed response, tokens"),
    # the workers' reports
    _gauge("roq_workers", "Workers: generating, waiting, loading, draining, starting, lost", "does"),
    _gauge("roq_workers_behind", "Live workers by versions behind the newest: 0, 1, 2+", "versions"),
    _gauge("roq_generation_tokens_per_second", "Total generation speed of the live workers"),
    _counter("roq_generated_tokens_total", "Tokens that the engines generated, including wasted ones"),
    _counter(
        "roq_worker_attempts_total",
        "Attempts by outcome: completed, failed, cancelled, fenced, released",
        "outcome",
    ),
    _counter(
        "roq_worker_seconds_total",
        "Seconds of all workers: idle (nothing in flight), blocked (free capacity, refused), reserve_wait",
        "why",
    ),
    _counter(
        "roq_weight_loads_total",
        "Weight loads by running engines: received from the trainer, or read from storage",
        "how",
    ),
    _histogram("roq_weight_sync_seconds", "Seconds an engine was paused to load new weights, for each load"),
    # the server
    _histogram(
        "roq_server_call_seconds",
        "Seconds that functions (fcall, fcall_ro) held the server, for all its runs since it started",
        "command",
    ),
)

HELP = {metric.name: metric.text for metric in METRICS}

FIGURES = {metric.published: metric.name for metric in METRICS if metric.published}
"""The exported trainer metrics: name in ``publish`` to name here."""
