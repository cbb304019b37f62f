"""Store a job in Redis and read it back: workers and the trainer need only the URL and the run's name."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from roq.client import Scheduler
from roq.client.async_scheduler import AsyncScheduler
from roq.config import Job
from roq.errors import UnknownRun
from roq.job.model_folder import vocab_size
from roq.job.prompts import Prompts, load_prompts

__all__ = ["create_run", "read_job", "read_job_async"]

_SECTIONS = ("run", "model", "data", "reward", "rollout", "trainer", "redis", "logging")

_DERIVED = ("data.length", "data.digest", "model.vocab_size")

T = TypeVar("T")


def _settings(job: Job, prompts: Prompts) -> dict[str, str]:
    """The job outside ``[protocol]`` as ``section.key`` and JSON text, and the prompts' digest."""
    settings = {
        f"{section}.{name}": msgspec.json.encode(value).decode()
        for section in _SECTIONS
        for name, value in msgspec.structs.asdict(getattr(job, section)).items()
    }
    settings["data.length"] = str(len(prompts))
    settings["data.digest"] = prompts.digest
    if (vocabulary := vocab_size(job.model.path)) is not None:
        settings["model.vocab_size"] = str(vocabulary)
    # The server's address differs between hosts, so it is not part of the run.
    return {name: value for name, value in settings.items() if not name.startswith("redis.")}


def create_run(sched: Scheduler, job: Job, prompts: Prompts | None = None) -> bool:
    """Create the run of a job, or confirm that it exists with the same job; returns True if it is new.

    Raises:
        ConfigError: the prompts cannot be loaded.
        ConfigMismatch: the run exists with another job; the message names the differing keys.
    """
    prompts = prompts or load_prompts(job.data)
    protocol = job.protocol
    if protocol.prompts is None:
        protocol = msgspec.structs.replace(protocol, prompts=len(prompts))
    return sched.create(protocol, settings=_settings(job, prompts), weights=job.model.path)


def _job(protocol: object, settings: dict[str, str]) -> Job:
    sections: dict[str, dict[str, object]] = {}
    for name, text in settings.items():
        section, _, key = name.partition(".")
        if name not in _DERIVED:
            sections.setdefault(section, {})[key] = msgspec.json.decode(text)
    if "run" not in sections:
        raise UnknownRun("this run was created without a job; create it with roq init or roq up")
    return msgspec.convert(sections | {"protocol": msgspec.to_builtins(protocol)}, Job)


def read_job(sched: Scheduler) -> Job:
    """The job that a run was created with.

    Raises:
        UnknownRun: there is no such run, or it was created without a job.
    """
    return _job(sched.config(), sched.settings())


async def read_job_async(sched: AsyncScheduler) -> Job:
    """As :func:`read_job`."""
    return _job(await sched.config(), await sched.settings())
