"""``roq doctor``: check a deployment, before and during a run.

Read-only, except for a small file in the run's folder and in its weight store, which it removes again.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version as package_version

from roq.admin.doctor import files, server
from roq.admin.finding import Finding, fail, ok, warn
from roq.admin.server import durability, eviction, one_client, version, wait_for_server
from roq.client import Scheduler
from roq.config import Job
from roq.errors import RoqError, UnknownRun
from roq.job.stored import read_job
from roq.observe.words import worker_info
from roq.protocol import library
from roq.types import Status

__all__ = ["Finding", "examine"]

REACH_S = 3.0
SILENT_S = 120.0  # a trainer last seen longer ago is reported


def examine(url: str | None, run: str | None, job: Job | None) -> Iterator[Finding]:
    """Check a server, a run on it and its files; a check that is not possible is also a finding.

    Args:
        url: the server's URL; None if the job's embedded server is not started yet.
        run: the run's name; None checks only the server.
        job: the job to run, if known; default: the job that the run was created with.
    """
    if job is not None:
        yield files.model(job)
    if url is None:
        yield warn("server", "not started yet; roq up starts an embedded server in the run's folder")
    else:
        try:
            wait_for_server(url, REACH_S)
        except RoqError as error:
            yield fail("server", str(error))
            return
        status: Status | None = None
        with one_client(url) as client:
            if (line := server.lacking(client, url)) is not None:
                yield line
                return
            info = server.server_info(client)
            yield version(url, info)
            loaded, allowed = server.probe(client)
            yield server.loaded_library(loaded)
            yield server.role(client, allowed, loaded is not None)
            yield durability(client, info)
            if (line := server.restart(client, info, run)) is not None:
                yield line
            yield eviction(client, info)
            yield server.clock(client)
        if run is not None and loaded != library.version():
            # A client would load its library, which a read-only check must not do.
            yield warn("run", f"{run} was not checked: the server does not have this client's library")
        elif run is not None:
            with Scheduler(url, run, retry_s=REACH_S) as scheduler:
                try:
                    status, job = scheduler.status(), job or _job_of(scheduler)
                    broken = scheduler.verify()
                    newest = next((w for w in scheduler.weights() if w.version == status.version), None)
                except UnknownRun:
                    yield warn("run", f"{run} does not exist on this server yet; create it with roq init")
                except RoqError as error:
                    yield fail("run", str(error))
                else:
                    yield _run(status, broken)
                    yield from _processes(status)
                    if status.version > 0:
                        yield files.weights(newest, job, ended=status.ended)
        yield server.memory(info, job, status)
    if job is not None:
        yield from files.files(job)


def _job_of(scheduler: Scheduler) -> Job | None:
    try:
        return read_job(scheduler)
    except UnknownRun:  # created from Python, without a job
        return None


# ---- the run -------------------------------------------------------------------------------------


def _run(status: Status, broken: list[str]) -> Finding:
    where = f"{status.run} at step {status.version}"
    if broken:
        return fail(
            "run",
            f"{where} violates {len(broken)} invariants (roq verify; make a roq export): {broken[0]}",
        )
    if status.ended:
        return ok("run", f"{where}, ended")
    if status.paused:
        return warn("run", f"{where}, paused; roq resume continues it")
    if status.ledger.dead:
        return warn("run", f"{where}; {status.ledger.dead} dead letters; `roq dead` shows why")
    return ok("run", f"{where}, all invariants hold")


def _processes(status: Status) -> Iterator[Finding]:
    ours, over = package_version("roq"), status.ended
    alive = [worker for worker in status.workers if worker.lease_left_s > 0]
    reported = {worker.worker: worker_info(worker).get("roq") for worker in alive}
    releases = {worker: str(release) for worker, release in reported.items() if release is not None}
    other = {worker: release for worker, release in releases.items() if release != ours}
    sick = [worker for worker in alive if worker_info(worker).get("error")]
    if other:
        named = ", ".join(f"{worker} {release}" for worker, release in sorted(other.items())[:4])
        yield warn("workers", f"{len(alive)} alive; not running roq {ours}: {named}; replace them one by one")
    elif sick:
        error = str(worker_info(sick[0])["error"])[:200]
        yield warn("workers", f"{len(alive)} alive; {sick[0].worker} reports: {error}")
    elif not alive and not over:
        yield warn("workers", "none alive; start one (python -m roq_worker --redis URL --run NAME)")
    else:
        yield ok("workers", ", roq ".join([f"{len(alive)} alive", *sorted(set(releases.values()))]))
    seen = status.trainer_seen_s
    if over:
        yield ok("trainer", "done")
    elif seen is None:
        yield warn("trainer", "none was seen yet; start it (python -m roq_trainer --redis URL --run NAME)")
    elif seen > SILENT_S and status.training is None:
        yield warn(
            "trainer",
            f"{status.trainer}, last seen {seen:.0f} s ago; restart it, it resumes from its checkpoint",
        )
    else:
        yield ok("trainer", f"{status.trainer}, last seen {seen:.0f} s ago")
