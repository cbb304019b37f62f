"""What ``roq doctor`` finds about the files that this host sees: model, weights, the run's folders."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from roq.admin.doctor.finding import Finding, fail, ok, warn
from roq.config import Job
from roq.errors import RoqError, TransferFailed
from roq.job.checks import check_model
from roq.text import size
from roq.types import WeightsRef
from roq.weights import FolderStore, is_url, messages, weight_store
from roq.weights.safetensors import check_weights

__all__ = ["files", "model", "weights"]

REACH_S = 3.0  # for a trainer that sends weights


def model(job: Job) -> Finding:
    """The model that training begins with."""
    length = job.data.max_prompt_tokens + job.rollout.max_tokens
    try:
        check_model(job.model.path, engines_here=False, max_model_len=length)
    except RoqError as error:
        return fail("model", str(error))
    return ok("model", job.model.path)


def weights(newest: WeightsRef | None, job: Job | None, *, ended: bool) -> Finding:
    """The newest published version, as a worker on this host would get it."""
    if newest is None or not newest.location:
        return warn("weights", "where the newest are is not registered; the run was published to by hand")
    stored = _stored(newest, job)
    if ended or job is None or job.run.transfer == "files":
        return stored
    where = newest.sender.rpartition("/")[0]  # without the secret
    if not where:
        lost = "the trainer does not send them just now (it starts, or is away)"
    elif _answers(newest.sender):
        if stored.state == "ok":
            return ok("weights", f"{stored.text}; the trainer sends them too, from {where}")
        return ok("weights", f"sent by the trainer from {where}, which answers; as files: {stored.text}")
    else:
        lost = f"the trainer sends them from {where}, which does not answer here (ROQ_TRAINER_ADDRESS)"
    if stored.state == "ok":
        return warn("weights", f"{lost}; workers read {stored.text}")
    return fail("weights", f"{lost}; {stored.text}")


def _answers(sender: str) -> bool:
    try:
        host, port, secret = messages.split_address(sender)
        with socket.create_connection((host, port), timeout=REACH_S) as connection:
            # An engine of no ranks: it is sent away, so something is alive there.
            connection.sendall(messages.encode(messages.Hello(secret, ranks=0)))
            return bool(connection.recv(1))
    except (OSError, ValueError, TransferFailed):
        return False


def _stored(newest: WeightsRef, job: Job | None) -> Finding:
    location = newest.location
    if is_url(location):
        if job is None:
            return warn("weights", f"{location}: the run has no job that names its store, so it is not read")
        try:
            whole = weight_store(job.run).is_whole(location)
        except RoqError as error:
            return fail("weights", str(error))
        if not whole:
            return fail("weights", f"{location} is not whole; a trainer that is started again writes it anew")
        return ok("weights", f"{location}, whole")
    folder = Path(location)
    if not folder.is_dir():
        return fail("weights", f"{location} is not here; mount that folder here, under the same path")
    try:
        check_weights(folder)
    except RoqError as error:
        return fail("weights", str(error))
    return ok("weights", f"{location}, readable and whole")


def files(job: Job) -> Iterator[Finding]:
    """Where the trainer writes and workers read."""
    yield _writable("folder", Path(job.run.dir))
    if job.run.weights is None:
        return
    try:
        store = weight_store(job.run)
        if isinstance(store, FolderStore):
            yield _writable("store", store.local)
            return
        store.probe()
    except RoqError as error:
        yield fail("store", str(error))
    else:
        yield ok("store", f"{store.url}: an object was written, read and deleted")


def _writable(name: str, folder: Path) -> Finding:
    there = next((path for path in (folder, *folder.parents) if path.exists()), Path("/"))
    try:
        with tempfile.NamedTemporaryFile(dir=there, prefix=".roq-doctor-"):
            free = os.statvfs(there)
    except OSError as error:
        return fail(
            name,
            f"{folder} cannot be written here ({error.strerror}); the trainer must, and workers must read it",
        )
    return ok(name, f"{folder} is writable, {size(free.f_bavail * free.f_frsize)} free")
