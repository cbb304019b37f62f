"""What a worker does once, before its loop: read the job, check the prompts, start the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from roq.client.async_scheduler import AsyncScheduler
from roq.config import Job
from roq.errors import ConfigError
from roq.job.prompts import Prompts, load_prompts
from roq.job.stored import read_job_async
from roq.weights import is_url, weight_store
from roq_worker.engine import Engine
from roq_worker.texts import check_lengths

__all__ = ["Stopped", "read_work", "start_engine", "unless"]

T = TypeVar("T")


class Stopped(Exception):
    """SIGTERM came while the worker was starting."""


async def read_work(scheduler: AsyncScheduler) -> tuple[Job, Prompts]:
    """The run's job, and its prompts as found on this host.

    Raises:
        ConfigError: they cannot be loaded, or are not the ones the run was created with.
    """
    job, settings = await read_job_async(scheduler), await scheduler.settings()
    prompts = await asyncio.to_thread(load_prompts, job.data)
    if settings.get("data.digest") != prompts.digest or settings.get("data.length") != str(len(prompts)):
        raise ConfigError(
            f"the {len(prompts)} prompts of {job.data.file or job.data.dataset} on this host (digest "
            f"{prompts.digest[:12]}) are not the {settings.get('data.length')} of the run (digest "
            f"{settings.get('data.digest', '')[:12]}); give this host the same file, or the same "
            "version of reasoning-gym"
        )
    return job, prompts


async def start_engine(scheduler: AsyncScheduler, worker: str, job: Job, prompts: Prompts) -> Engine:
    """Start the engine on the newest published weights, pinned so that nobody deletes them meanwhile.

    Where the trainer sends weights and its files are not seen from here, start on the base model: the loop
    receives the newest first thing.

    Raises:
        ConfigError: the model, the engine's arguments or the prompts' lengths cannot work.
        EngineError: vLLM did not start.
    """
    weight_store(job.run)  # a missing driver is found now, not with the first new weights
    weights = await scheduler.pin(worker)
    if job.run.transfer != "files" and not _is_readable(weights.location):
        weights = await scheduler.pin(worker, version=0)
    engine = await Engine.start(
        weights.location,
        weights.version,
        job.rollout,
        dtype=job.model.dtype,
        max_prompt_tokens=job.data.max_prompt_tokens,
    )
    try:
        await asyncio.to_thread(check_lengths, prompts, engine.tokenizer, job.data)
    except ConfigError:
        engine.close()
        raise
    return engine


def _is_readable(location: str) -> bool:
    return is_url(location) or Path(location).is_dir()


async def unless(stop: asyncio.Event, work: Awaitable[T]) -> T:
    """The result of ``work``.

    Raises:
        Stopped: ``stop`` was set before it was there.
    """
    task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if task.done():
        return task.result()
    task.cancel()
    raise Stopped
