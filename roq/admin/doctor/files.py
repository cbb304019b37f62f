"""The checks of ``roq doctor`` on files, from this host: the model, the weights, the run's folders."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

from roq.admin.finding import Finding, fail, ok, warn
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
    """Check the model that training starts from."""
    length = job.data.max_prompt_tokens + job.rollout.max_tokens
    try:
        check_model(job.model.path, engines_here=False, max_model_len=length)
    except RoqError as error:
        return fail("model", str(error))
    return ok("model", job.model.path)


def weights(newest: WeightsRef | None, job: Job | None, *, ended: bool) -> Finding:
    """Check the newest published version, as a worker on this host would get it."""
    if newest is None or not newest.location:
        return warn("weights", "the newest version has no registered location; it was published by hand")
    stored = _stored(newest, job)
    if ended or job is None or job.run.transfer == "files":
        return stored
    where = newest.sender.rpartition("/")[0]  # without the secret
    if not where:
        lost = "the trainer is not sending them now (it is starting, or not running)"
    elif _answers(newest.sender):
        if stored.state == "ok":
            return ok("weights", f"{stored.text}; the trainer also sends them, from {where}")
        return ok("weights", f"the trainer sends them from {where}, which answers; as files: {stored.text}")
    else:
        lost = f"the trainer sends them from {where}, which does not answer this host (ROQ_TRAINER_ADDRESS)"
    if stored.state == "ok":
        return warn("weights", f"{lost}; workers read {stored.text}")
    return fail("weights", f"{lost}; {stored.text}")


def _answers(sender: str) -> bool:
    try:
        host, port, secret = messages.split_address(sender)
        with socket.create_connection((host, port), timeout=REACH_S) as connection:
            # An engine with 0 ranks gets a refusal, which shows that the sender is alive.
            connection.sendall(messages.encode(messages.Hello(secret, ranks=0)))
            return bool(connection.recv(1))
    except (OSError, ValueError, TransferFailed):
        return False


def _stored(newest: WeightsRef, job: Job | None) -> Finding:
    location = newest.location
    if is_url(location):
        if job is None:
            return warn("weights", f"{location}: not checked, as the run has no job that names its store")
        try:
            whole = weight_store(job.run).is_whole(location)
        except RoqError as error:
            return fail("weights", str(error))
        if not whole:
            return fail("weights", f"{location} is incomplete; restart the trainer, it writes it again")
        return ok("weights", f"{location}, complete")
    folder = Path(location)
    if not folder.is_dir():
        return fail("weights", f"{location} does not exist on this host; mount it under the same path")
    try:
        check_weights(folder)
    except RoqError as error:
        return fail("weights", str(error))
    return ok("weights", f"{location}, readable and complete")


def files(job: Job) -> Iterator[Finding]:
    """Check the folders and the store that the trainer writes and workers read."""
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
            f"{folder} is not writable here ({error.strerror}); the trainer must write and workers read it",
        )
    return ok(name, f"{folder} is writable, {size(free.f_bavail * free.f_frsize)} free")
