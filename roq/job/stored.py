"""Store a job in Redis and read it back: workers and the trainer need only the URL and the run's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from roq.client import Scheduler
from roq.client.async_scheduler import AsyncScheduler
from roq.client.operations import config_fields
from roq.config import CHANGEABLE, Job
from roq.errors import ConfigMismatch, UnknownRun
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


def create_run(
    sched: Scheduler,
    job: Job,
    prompts: Prompts | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> bool:
    """Create the run of a job, or confirm that it exists with the same job; returns True if it is new.

    Keys that may change between starts (:data:`roq.config.CHANGEABLE`) are changed; ``say`` gets a line.

    Raises:
        ConfigError: the prompts cannot be loaded.
        ConfigMismatch: the run exists with another job; the message names the differing keys.
    """
    prompts = prompts or load_prompts(job.data)
    protocol = job.protocol
    if protocol.prompts is None:
        protocol = msgspec.structs.replace(protocol, prompts=len(prompts))
    settings = _settings(job, prompts)
    try:
        return sched.create(protocol, settings=settings, weights=job.model.path)
    except ConfigMismatch:
        stored = config_fields(sched.config()) | sched.settings()
        wanted = config_fields(protocol.checked()) | settings
        different = sorted(name for name in stored | wanted if stored.get(name) != wanted.get(name))
        if not different:  # of another revision of the library
            raise
    fixed = [name for name in different if _key(name) not in CHANGEABLE]

    def shown(names: list[str], verb: str) -> str:
        return "; ".join(
            f"{_key(name)} (run: {stored.get(name, 'unset')}, {verb}: {wanted.get(name, 'unset')})"
            for name in names
        )

    if fixed:
        raise ConfigMismatch(
            f"the run exists with another configuration: {shown(fixed, 'given')}. These define its data or "
            "protocol: set them back, or create a new run under another [run] name and dir. What may change "
            "between starts is marked in docs/configuration.md (trainer.*, logging.*, rollout.workers, …)"
        )
    sched.configure({name: wanted.get(name, "") for name in different})
    say(f"changed for what starts from now on: {shown(different, 'now')}")
    return False


def _key(name: str) -> str:
    """The key of the job file that is stored under a name."""
    if "." in name:
        return name
    return f"protocol.{name.removesuffix('_ms') + '_s' if name.endswith('_ms') else name}"


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
