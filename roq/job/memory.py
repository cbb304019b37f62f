"""Estimate the memory of a run in Redis. Measured in tests/job/test_memory.py and docs/operations.md."""

from __future__ import annotations

from roq.config import Job, RunConfig

__all__ = ["run_bytes", "trajectories_kept", "trajectory_bytes"]

_EVENT = 100  # bytes of an event in the stream


def trajectory_bytes(prompt: int, response: int) -> int:
    """Bytes of one finished trajectory, including its share of the group's record and the indexes.

    The data is ``4 * prompt + 8 * response + 100`` bytes: int32 ids, and float32 log-probs of the response.
    The allocator rounds large values up, in Redis by up to 15%; records and indexes take about 1.3 kB.

    Args:
        prompt, response: their lengths in tokens.
    """
    return round(1.15 * (4 * prompt + 8 * response + 100)) + 1300


def trajectories_kept(config: RunConfig, checkpoint_every: int, keep_checkpoints: int = 1) -> int:
    """The most trajectories at one time: η + 1 buffers, and the batches since the oldest kept checkpoint."""
    window = (config.eta + 1) * config.slots * config.candidates
    batches = checkpoint_every * keep_checkpoints
    batches = min(batches, config.total_steps or batches)
    return window + batches * config.batch_size * config.group_size


def run_bytes(job: Job, prompt: int | None = None, response: int | None = None) -> int:
    """The most bytes that a run takes if all responses have this length.

    Args:
        job: the run. prompt, response: lengths in tokens; None: the longest that the job allows.
    """
    each = trajectory_bytes(
        job.data.max_prompt_tokens if prompt is None else prompt,
        job.rollout.max_tokens if response is None else response,
    )
    kept = trajectories_kept(job.protocol, job.trainer.checkpoint_every, job.trainer.keep_checkpoints)
    return kept * each + _EVENT * job.protocol.event_log
