"""Send published weights to the workers that request them, in a process next to the trainer's rank 0.

The trainer starts it if ``[run] transfer`` is set; :class:`Sender` is its handle. The process maps the files
of a version, which are still in the page cache, and broadcasts them to the ranks of one engine
(roq/weights/broadcast.py). The trainer never waits for it; a worker that dies or hangs blocks one thread.

Not yet run on GPUs (NCCL).
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import logging
import os
import resource
import secrets
import select
import socket
import socketserver
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import msgspec
import torch

from roq import Scheduler
from roq.errors import ConfigError, Refused, RoqError
from roq.processes import watch_parent
from roq.text import is_file_name, one_line, printable
from roq.weights import broadcast, messages
from roq.weights.rendezvous import Table
from roq.weights.safetensors import WeightFiles

__all__ = ["Sender"]

log = logging.getLogger("roq.trainer")

AT_ONCE = 4  # concurrent transfers; each takes two buffers on the GPU
HELLO_S = 10.0  # for the first line of a connection
QUEUE_S = 120.0  # longest time in the queue; then the worker reads the files
QUEUED_S = 3.0  # how often a queued worker gets an answer
GO_S = 60.0  # from the offer until the worker's engine is paused
START_S = 120.0  # importing torch from a cold disk takes a while
RESTART_S = 10.0  # between two starts
BEAT_S = 30.0  # without a sign of life for this long, the process hangs
TURN_S = 300.0  # one transfer; a longer one hangs and cannot be interrupted
MOST_RANKS = 1024
LINE_BYTES = 4096  # of a worker's message
SERVED_S = 30.0  # how often the address is announced again: Redis may have lost it


class Sender:
    """The trainer's handle of the process that sends weights.

    Args:
        backend: "nccl" or "gloo". folder: the folder of exported versions. host: an address of this host that
            workers can reach.
    """

    def __init__(self, backend: str, folder: Path, host: str) -> None:
        self._command = [sys.executable, "-m", "roq_trainer.sender", "--folder", str(folder)]
        self._command += ["--backend", backend, "--host", host]
        self._backend, self._host = backend, host
        self._process: subprocess.Popen[bytes] | None = None
        self._address = self._announced = ""
        self._started_at = self._beat_at = self._served_at = 0.0
        self._received = b""

    def start(self) -> None:
        """Start the process, and wait until it listens.

        Raises:
            ConfigError: the process does not start.
        """
        if self._backend == "nccl" and not torch.cuda.is_available():
            raise ConfigError(
                'run.transfer = "nccl", but no GPU is visible to the trainer; use "gloo" or "files"'
            )
        self._spawn()
        self._listen(START_S)
        if self._address:
            if self._address.startswith("127."):
                log.info("sending weights from %s: for workers on other hosts, set --address", self._host)
            return
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)  # it is printing the reason
        self.close()
        raise ConfigError(
            f"the process that sends weights (run.transfer) did not start on {self._host}; see the lines "
            'above. Set ROQ_TRAINER_ADDRESS to an address of this host, or transfer = "files"'
        )

    def announce(self, sched: Scheduler, trainer: str) -> None:
        """Announce the sender's address if it changed; restart a process that ended or hangs. Never waits.

        Raises:
            Fenced: another trainer has taken over.
        """
        self._listen(0.0)
        now = time.monotonic()
        if self._process is not None and now - self._beat_at > (BEAT_S if self._address else START_S):
            log.warning("the process that sends weights is unresponsive; killing it")
            self.close()
        if self._process is None or self._process.poll() is not None:
            self._address = ""
            if now - self._started_at > RESTART_S:
                log.warning("the process that sends weights has ended; restarting it")
                self.close()
                self._spawn()
        if self._address != self._announced or (self._address and now - self._served_at > SERVED_S):
            sched.announce_sender(self._address, trainer)
            self._announced, self._served_at = self._address, now

    def leave(self, sched: Scheduler, trainer: str) -> None:
        """Withdraw the address and end the process."""
        with contextlib.suppress(Refused):
            sched.announce_sender("", trainer)
        self.close()

    def _spawn(self) -> None:
        self._started_at = self._beat_at = time.monotonic()
        self._received = b""
        try:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True,
                env={"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ},  # it warns of addresses without a name
            )  # fmt: skip
        except OSError as error:  # out of memory, or too many processes
            log.warning("the process that sends weights cannot be started: %s", error)

    def _listen(self, limit_s: float) -> None:
        """Read the process's output: a line with its address, then a dot every half second."""
        if self._process is None or self._process.stdout is None:
            return
        pipe = self._process.stdout.fileno()
        while select.select([pipe], [], [], 0.0 if self._address else limit_s)[0]:
            data = os.read(pipe, 1 << 16)
            if not data:
                return
            self._beat_at = time.monotonic()
            if not self._address:
                self._received += data
                address, line, _ = self._received.partition(b"\n")
                self._address = address.decode() if line else ""

    def close(self) -> None:
        """Kill the process; transfers in progress fail."""
        process, self._process = self._process, None
        self._address = ""
        if process is not None:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


class _Server(socketserver.ThreadingTCPServer):
    """One thread for each connected worker."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, host: str, folder: Path, backend: str, alive: int) -> None:
        self.alive = alive  # file descriptor for signs of life
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self.address_family = found[0]
        super().__init__((host, 0), _Connection)
        self.folder = folder
        self.backend = backend
        self.bucket = messages.BUCKET_BYTES
        self.secret = secrets.token_urlsafe(24)
        self.device = torch.device("cpu")
        if backend == "nccl":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        self.turns = threading.BoundedSemaphore(AT_ONCE)
        self.deadlines: dict[str, float] = {}  # engine -> end of its transfer
        self.names = itertools.count(1)
        self.tables: dict[str, Table] = {}  # group -> its keys, while its engine is connected

    def service_actions(self) -> None:
        """Runs every half second: send a sign of life, and end with the trainer or a hung transfer."""
        try:
            os.write(self.alive, b".")
        except BlockingIOError:  # the trainer is in a long step
            pass
        except BrokenPipeError:  # it has ended
            os._exit(1)
        if any(time.monotonic() > deadline for deadline in list(self.deadlines.values())):
            _say(f"a transfer took longer than {TURN_S:.0f} s; exiting, to be restarted by the trainer")
            os._exit(1)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        _say(f"sending to {client_address[0]} failed: {one_line(sys.exception())}")


class _Connection(socketserver.StreamRequestHandler):
    """The conversation with one worker, from its hello until it disconnects."""

    server: _Server

    def handle(self) -> None:
        messages.notice_death(self.connection)
        if not self._has_more(HELLO_S):  # a probe of the port
            return None
        hello = self._read(messages.Hello | messages.Join, HELLO_S)
        if isinstance(hello, messages.Join):
            return self._meet(hello.group)
        if not hmac.compare_digest(hello.secret.encode(), self.server.secret.encode()):
            return self._write(messages.Meeting(error="wrong secret; pin the newest weights again"))
        if not 1 <= hello.ranks <= MOST_RANKS:
            return self._write(messages.Meeting(error=f"{hello.ranks} ranks; expected 1 to {MOST_RANKS}"))
        if self.server.device.type == "cuda":
            torch.cuda.set_device(self.server.device)
        name = f"engine-{next(self.server.names)}"
        joined = secrets.token_urlsafe(24)
        table = self.server.tables[joined] = Table()
        try:
            self._write(messages.Meeting(self.server.backend, joined))
            here = self.connection.getsockname()[0]
            group = broadcast.Group(
                self.server.backend, here, 0, joined,
                rank=0, size=hello.ranks + 1, address=here, table=table,
            )  # fmt: skip
            try:
                while self._has_more(None):
                    self._serve(group, name, self._read(messages.Ask, GO_S).name)
            finally:
                group.close()
        finally:
            del self.server.tables[joined]
        return None

    def _meet(self, group: str) -> None:
        """Give a rank the keys of its group until it disconnects."""
        if group not in self.server.tables:
            return self._write(messages.Found(error="there is no such group"))
        self._write(messages.Found())
        while self._has_more(None) and (table := self.server.tables.get(group)) is not None:
            self._write(table.answer(self._read(messages.Key, HELLO_S, messages.KEY_BYTES)))
        return None

    def _has_more(self, limit_s: float | None) -> bool:
        """Wait for a message of the worker; False when it has disconnected."""
        self.connection.settimeout(limit_s)
        return bool(self.rfile.peek(1))  # type: ignore[attr-defined]

    def _serve(self, group: broadcast.Group, engine: str, wanted: str) -> None:
        deadline = time.monotonic() + QUEUE_S
        while not self.server.turns.acquire(timeout=QUEUED_S):
            if time.monotonic() > deadline:
                self._write(messages.Offer(error=f"still queued after {QUEUE_S:.0f} s"))
                return
            self._write(messages.Offer(queued=True))
        self.server.deadlines[engine] = time.monotonic() + TURN_S
        try:
            with ExitStack() as stack:
                try:
                    source = stack.enter_context(_open(self.server.folder, wanted))
                    offer = _offer(source, self.server.bucket)
                except (OSError, RoqError) as error:
                    self._write(messages.Offer(error=f"{wanted}: {one_line(error)}"))
                    return
                self._write(offer)
                self._read(messages.Go, GO_S)
                broadcast.send(group, source, offer, self.server.device)
                self._write(messages.Done())
        finally:
            del self.server.deadlines[engine]
            self.server.turns.release()

    def _read(self, kind: Any, limit_s: float, most: int = LINE_BYTES) -> Any:
        """Read a message, all of it within ``limit_s``."""
        deadline, line = time.monotonic() + limit_s, b""
        while not line.endswith(b"\n") and len(line) < most:
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            there: bytes = self.rfile.peek(1)  # type: ignore[attr-defined]
            if not there:
                break
            line += self.rfile.read(there.find(b"\n") + 1 or len(there))
        return messages.decode(line, kind)

    def _write(self, message: msgspec.Struct) -> None:
        self.connection.settimeout(GO_S)
        self.wfile.write(messages.encode(message))


def _open(folder: Path, name: str) -> WeightFiles:
    """The files of the version exported as ``name``.

    Raises:
        ConfigError: the files are missing or cannot be read.
    """
    if not is_file_name(name) or not (folder / name).is_dir():
        raise ConfigError("its files are not here")
    return WeightFiles(folder / name)


def _offer(files: WeightFiles, bucket: int) -> messages.Offer:
    """The offer of all tensors; raises TransferFailed if one of them cannot be sent."""
    tensors = [messages.Tensor(name, t.dtype, list(t.shape)) for name, t in files.tensors.items()]
    for tensor in tensors:
        broadcast.dtype_of(tensor)
    return messages.Offer(tensors, bucket)


def _say(line: str) -> None:
    text = printable(f"{time.strftime('%H:%M:%S')} sender: {line}")
    sys.stderr.write(f"{text}\n")  # one write: there are many threads
    sys.stderr.flush()


@click.command()
@click.option(
    "--folder", required=True, type=click.Path(path_type=Path), help="The folder of exported versions."
)
@click.option("--backend", required=True, type=click.Choice(["nccl", "gloo"]), help="The transport.")
@click.option("--host", required=True, help="The address to listen on, reachable by workers.")
def main(folder: Path, backend: str, host: str) -> None:
    """Send weights to workers until the trainer that started this process ends. Prints its address first."""
    watch_parent()
    # NCCL logs to standard output, which is reserved for the address and signs of life.
    output = os.dup(1)
    os.dup2(2, 1)
    _raise_limit()
    try:
        server = _Server(host, folder, backend, output)
    except (OSError, RuntimeError) as error:
        raise click.ClickException(f"cannot listen on {host}: {one_line(error)}") from None
    shown = f"[{host}]" if ":" in host else host
    os.write(output, f"{shown}:{server.server_address[1]}/{server.secret}\n".encode())
    os.set_blocking(output, False)
    with server:
        server.serve_forever()


def _raise_limit() -> None:
    """Raise the limit of open files: an engine of one rank takes 9 file descriptors, one of eight 23."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS has a lower limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()
