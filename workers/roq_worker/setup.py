"""Start a worker: read the job, check the prompts, start engine, heartbeat and function processes."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from roq.client import Scheduler
from roq.client.async_scheduler import AsyncScheduler
from roq.config import Job
from roq.errors import ConfigError
from roq.job.prompts import Prompts, load_prompts
from roq.job.stored import read_job_async
from roq.job.tokens import check_prompts
from roq.processes import unique_name
from roq.text import printable
from roq.weights import is_url, weight_store
from roq_worker.engine import Engine
from roq_worker.function_pool import PostProcess, Rewards
from roq_worker.heartbeat import Heartbeat
from roq_worker.inbox import Inbox
from roq_worker.metrics import Counters, Log

__all__ = ["Worker", "start_worker"]


@dataclass(frozen=True)
class Worker:
    """The parts of a running worker."""

    name: str
    job: Job
    prompts: Prompts
    scheduler: AsyncScheduler
    engine: Engine
    rewards: Rewards
    post_process: PostProcess
    beat: Heartbeat
    inbox: Inbox
    counters: Counters
    log: Log
    say: Callable[[str], None]

    async def close(self) -> None:
        """Stop the engine and all processes, without releasing claims."""
        self.engine.close()
        await asyncio.gather(self.rewards.close(), self.post_process.close())
        await self.scheduler.aclose()


async def start_worker(url: str, run: str, name_prefix: str) -> Worker:
    """Start everything, the heartbeat first.

    Raises:
        Stopped: SIGTERM arrived first.
        ConfigError: something in the job cannot work on this host.
        EngineError: vLLM did not start.
        RoqError: the run does not exist, or its server cannot be used.
    """
    name, inbox = unique_name(name_prefix), Inbox()
    say = partial(_say, name)
    scheduler = AsyncScheduler(url, run, retry_s=None)  # wait for an unreachable server, and log it
    job, prompts = await inbox.unless_stopped(read_work(scheduler))
    beat = Heartbeat(
        Scheduler(url, run, retry_s=None),
        name,
        job.protocol.lease_s,
        on_renewal=inbox.renewed,
        on_failure=inbox.failed,
        say=say,
    )
    beat.info = {"roq": version("roq"), "doing": "starting"}
    beat.start()  # before the engine: the pin on its weights lasts only as long as the lease
    rewards, post_process = Rewards(job.reward), PostProcess(job.protocol.post_process, job.reward)
    try:
        await inbox.unless_stopped(asyncio.gather(rewards.start(), post_process.start()))
        engine = await inbox.unless_stopped(start_engine(scheduler, name, job, prompts))
    except BaseException:
        beat.stop()
        await asyncio.gather(rewards.close(), post_process.close())
        with suppress(TimeoutError):
            await asyncio.wait_for(scheduler.leave(name), job.rollout.shutdown_s)
        raise
    say(f"ready: weights v{engine.version}, capacity {job.rollout.max_concurrency}")
    log = Log(Path(job.run.dir), name, say)
    return Worker(
        name, job, prompts, scheduler, engine, rewards, post_process, beat, inbox, Counters(), log, say
    )


def _say(worker: str, line: str) -> None:
    print(printable(f"{time.strftime('%H:%M:%S')} {worker}: {line}"), file=sys.stderr, flush=True)


async def read_work(scheduler: AsyncScheduler) -> tuple[Job, Prompts]:
    """The run's job, and its prompts from this host.

    Raises:
        ConfigError: the prompts cannot be loaded, or differ from those the run was created with.
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
    """Start the engine on the newest published weights, pinned so that they are not deleted while it loads.

    Where the trainer sends weights and its files are not readable here, start on the base model; the loop
    then receives the newest version first.

    Raises:
        ConfigError: the model, the engine's arguments or the prompts' lengths cannot work.
        EngineError: vLLM did not start.
    """
    weight_store(job.run)  # finds a missing driver now, not with the first new weights
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
        await asyncio.to_thread(check_prompts, prompts, engine.tokenizer, job.data)
    except ConfigError:
        engine.close()
        raise
    return engine


def _is_readable(location: str) -> bool:
    return is_url(location) or Path(location).is_dir()
