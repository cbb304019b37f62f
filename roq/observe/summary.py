"""The summary of a run, from its processes' records; ``summary.json`` in the run's folder.

A process's counters start at zero, so totals add up the last line of every process. A step that was trained
again after a restart counts once, with its last line; its time counts twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import msgspec

from roq.config import RunConfig
from roq.observe.metrics_log import Records, Step
from roq.observe.timeline import WaitShares
from roq.observe.words import ledger_text, shortfall
from roq.text import clock, size
from roq.types import Ledger, Status

__all__ = ["Share", "Summary", "Wait", "summarize", "summary_lines", "write_summary"]


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """Share of the worker processes' and the trainer's wall time that scheduler calls take, 0 to 1.

    Attributes:
        worker: time that calls occupy the worker's event loop.
        trainer: time that the trainer spends in calls, including waiting for replies.
        worker_under_way: time with at least one call in flight; the loop is not blocked by it.
        worker_reserve_wait: time waiting for work with free capacity in the engine.
    """

    worker: float | None
    trainer: float | None
    worker_under_way: float | None
    worker_reserve_wait: float | None


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds the trainer waited for batches and the workers for work, including the engines' startup.

    Measured by each process; a worker waits while nothing is in flight, and all workers are added up.
    """

    trainer: float
    workers: float


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Peak resident memory of any one process of each kind, in bytes; None if unknown."""

    server: int | None
    worker: int | None
    trainer: int | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The summary of a run.

    Attributes:
        run: its name.
        ended: it reached its end (all steps trained or prompts used up).
        shortfall: why the run stopped before its goal, in one line with the counts of prompts; None when it
            did not.
        steps: updates published.
        eta: the configured maximum staleness.
        max_staleness: the greatest staleness of any trained group.
        staleness_histogram: trained trajectories by their staleness.
        batches_full: steps whose batch had all ``batch_size`` groups with all their members.
        reward_first5, reward_last5: mean reward of the first and last five batches.
        ledger: the state of every issued prompt.
        logprob_abs_diff_mean: mean absolute difference between the engine's and the trainer's log-probs over
            all tokens sampled and trained at the same version, in nats; None if there were none.
        mismatch_kl: mean over steps of the k3 estimate between engine and trainer, in nats.
        scheduler_share: see :class:`Share`.
        wall_s: time during which any process of the run was running.
        wait_s: see :class:`Wait`.
        waiting: shares of the time after the engines' startup, from the events, as in ``roq report``: see
            :class:`roq.observe.timeline.WaitShares`; None if the events have fewer than three steps.
        blocked_s: seconds, over all workers, with free capacity that the scheduler did not fill.
        tokens_per_s: response tokens generated per second of ``wall_s``.
        tokens_trained: response tokens in trained batches.
        rss_bytes: see :class:`Memory`.
        worker_processes, trainer_processes: number of processes, including restarts.
        verify: the violated invariants; empty if all hold.
    """

    run: str
    ended: bool
    shortfall: str | None
    steps: int
    eta: int
    max_staleness: int
    staleness_histogram: dict[str, int]
    batches_full: int
    reward_first5: float | None
    reward_last5: float | None
    ledger: Ledger
    logprob_abs_diff_mean: float | None
    mismatch_kl: float | None
    scheduler_share: Share
    wall_s: float
    wait_s: Wait
    waiting: WaitShares | None
    blocked_s: float
    tokens_per_s: float
    tokens_trained: int
    rss_bytes: Memory
    worker_processes: int
    trainer_processes: int
    verify: list[str]


def summarize(
    records: Records,
    status: Status,
    config: RunConfig,
    verify: Sequence[str],
    server_rss: int | None,
    waiting: WaitShares | None = None,
) -> Summary:
    """Summarize a run from its records, its last status and the server's memory (bytes)."""
    steps = records.steps
    trainers = trainer_processes(records.lines)
    workers = [lines for lines in records.workers.values() if lines]
    last = [lines[-1] for lines in workers]
    histogram: dict[int, int] = {}
    for step in steps:
        for staleness, count in step.staleness_counts.items():
            histogram[int(staleness)] = histogram.get(int(staleness), 0) + count
    intervals = [(lines[0].time - lines[0].wall_s, lines[-1].time) for lines in workers]
    intervals += [(lines[0].time - lines[0].wall_s, lines[-1].time) for lines in trainers]
    wall_s = covered(intervals)
    tokens = sum(line.tokens for line in last)
    full = (config.batch_size, config.batch_size * config.group_size)
    rewards = [step.reward_mean for step in steps if step.reward_mean is not None]
    return Summary(
        run=status.run,
        ended=status.ended,
        shortfall=shortfall(status, config),
        steps=status.version,
        eta=config.eta,
        max_staleness=max((step.staleness_max for step in steps), default=0),
        staleness_histogram={str(key): histogram[key] for key in sorted(histogram)},
        batches_full=sum((step.groups, step.trajectories) == full for step in steps),
        reward_first5=_mean(rewards[:5]),
        reward_last5=_mean(rewards[-5:]),
        ledger=status.ledger,
        logprob_abs_diff_mean=_weighted((step.abs_diff_mean, step.abs_diff_tokens) for step in steps),
        mismatch_kl=_mean([step.mismatch_kl for step in steps if step.mismatch_kl is not None]),
        scheduler_share=Share(
            worker=_ratio(sum(line.scheduler_s for line in last), sum(line.wall_s for line in last)),
            worker_under_way=_ratio(
                sum(line.scheduler_under_way_s for line in last), sum(line.wall_s for line in last)
            ),
            worker_reserve_wait=_ratio(
                sum(line.reserve_wait_s for line in last), sum(line.wall_s for line in last)
            ),
            trainer=_ratio(
                sum(lines[-1].scheduler_s for lines in trainers), sum(lines[-1].wall_s for lines in trainers)
            ),
        ),
        wall_s=round(wall_s, 3),
        wait_s=Wait(
            trainer=round(sum(line.wait_s for line in records.lines), 3),
            workers=round(sum(line.idle_s for line in last), 3),
        ),
        waiting=waiting,
        blocked_s=round(sum(line.blocked_s for line in last), 3),
        tokens_per_s=round(tokens / wall_s, 1) if wall_s > 0 else 0.0,
        tokens_trained=sum(step.response_tokens for step in steps),
        rss_bytes=Memory(
            server=server_rss,
            worker=max((line.rss_bytes for lines in workers for line in lines), default=None),
            trainer=max((line.rss_bytes for line in records.lines), default=None),
        ),
        worker_processes=len(workers),
        trainer_processes=len(trainers),
        verify=list(verify),
    )


def trainer_processes(lines: Sequence[Step]) -> list[list[Step]]:
    """Split the trainer's lines by process: a process starts after the last line of the previous one."""
    processes: list[list[Step]] = [[line] for line in lines[:1]]
    for before, line in pairwise(lines):
        if line.time - line.wall_s > before.time or line.wall_s < before.wall_s:
            processes.append([])
        processes[-1].append(line)
    return processes


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the length of the union of intervals.

    >>> covered([(0.0, 4.0), (3.0, 5.0), (10.0, 11.0)])
    6.0
    """
    total, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _mean(values: Sequence[float]) -> float | None:
    return round(fmean(values), 6) if values else None


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 6) if whole > 0 else None


def _weighted(pairs: Iterable[tuple[float | None, int]]) -> float | None:
    known = [(value, weight) for value, weight in pairs if value is not None and weight > 0]
    weights = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / weights if weights else None


def write_summary(summary: Summary, run_dir: str | Path) -> Path:
    """Write ``summary.json`` atomically."""
    path = Path(run_dir) / "summary.json"
    new = path.with_name("summary.json.new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    new.replace(path)
    return path


def summary_lines(summary: Summary) -> list[tuple[str, str]]:
    """Return the summary as a human-readable table: rows of (name, value)."""

    def share(value: float | None) -> str:
        return _text(value, ".2%")

    def rss(value: int | None) -> str:
        return "?" if value is None else size(value)

    memory = summary.rss_bytes
    shares = summary.scheduler_share
    histogram = ", ".join(f"{count} at {key}" for key, count in summary.staleness_histogram.items())
    first, last = _text(summary.reward_first5, ".3f"), _text(summary.reward_last5, ".3f")
    broken = summary.verify
    return [
        ("steps", f"{summary.steps}" + ("" if summary.ended else " so far (the run has not ended)")),
        ("full batches", f"{summary.batches_full} of {summary.steps}"),
        ("reward", f"{first} (first 5 batches) → {last} (last 5)"),
        (
            "staleness",
            f"at most {summary.max_staleness}, limit {summary.eta}; trajectories: {histogram or 'none'}",
        ),
        ("prompts", ledger_text(summary.ledger)),
        (
            "log-prob difference",
            f"{_text(summary.logprob_abs_diff_mean, '.2e')} between engine and trainer with the same weights",
        ),
        ("time", f"{clock(summary.wall_s)}, {summary.tokens_per_s:,.0f} tokens/s"),
        ("waiting", _waiting(summary)),
        ("scheduler share", f"worker {share(shares.worker)}, trainer {share(shares.trainer)}"),
        (
            "memory",
            f"server {rss(memory.server)}, worker {rss(memory.worker)}, trainer {rss(memory.trainer)}",
        ),
        ("invariants", "all hold" if not broken else f"{len(broken)} BROKEN: {broken[0]}"),
    ]


def _waiting(summary: Summary) -> str:
    every = f"trainer {clock(summary.wait_s.trainer)}, workers {clock(summary.wait_s.workers)} in total"
    if summary.waiting is None:
        return every
    workers = _text(summary.waiting.workers, ".0%")
    return f"{every}; after step 1 {summary.waiting.trainer:.0%} and {workers} of their time"


def _text(value: float | None, form: str) -> str:
    return "?" if value is None else format(value, form)
