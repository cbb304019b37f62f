"""Sending weights: the real sender, and ranks that receive as an engine's would. On gloo."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import save_file

from roq.errors import ConfigError, Fenced, TransferFailed
from roq.weights import broadcast, messages, rendezvous
from roq_trainer import sender as sending
from roq_trainer.sender import Sender

CPU = torch.device("cpu")
HOST = "127.0.0.1"


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of several types, with sizes that leave offsets unaligned; one is larger than a bucket."""
    made = torch.Generator().manual_seed(seed)
    return {
        "a.scale": torch.randn((), generator=made),
        "b.odd": torch.randn(3, 5, generator=made).to(torch.bfloat16),
        "c.bytes": torch.randint(0, 255, (7,), generator=made, dtype=torch.uint8),
        "d.large": torch.randn(64, 33, generator=made),
        "e.none": torch.empty(0, 4),
        "f.half": torch.randn(9, generator=made).half(),
        "g.ids": torch.randint(0, 9, (2, 2), generator=made),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Version 1 in one file, version 2 in two."""
    (tmp_path / "v00000001").mkdir()
    save_file(tensors(1), tmp_path / "v00000001" / "model.safetensors")
    (tmp_path / "v00000002").mkdir()
    halves = list(tensors(2).items())
    for i, part in enumerate((halves[:3], halves[3:])):
        save_file(dict(part), tmp_path / "v00000002" / f"model-{i}.safetensors")
    index = {name: f"model-{i}.safetensors" for i in (0, 1) for name in dict((halves[:3], halves[3:])[i])}
    (tmp_path / "v00000002" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tmp_path


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[str]:
    """A sender in a thread of this process; yields its address."""
    with (
        Path("/dev/null").open("w") as nobody,
        sending._Server(HOST, folder, "gloo", nobody.fileno()) as server,
    ):
        for name, value in settings.items():
            setattr(server, name, value)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"{HOST}:{server.server_address[1]}/{server.secret}"
        server.shutdown()
        thread.join()


@contextmanager
def started(folder: Path, host: str = HOST) -> Iterator[Sender]:
    """A sender process, and the trainer's handle of it."""
    sender = Sender("gloo", folder, host)
    sender.start()
    try:
        yield sender
    finally:
        sender.close()


class Engine:
    """A connection, and ``ranks`` threads that receive as an engine's ranks do."""

    def __init__(self, address: str, ranks: int = 1, own: str = HOST) -> None:
        host, port, self._secret = messages.split_address(address)
        self._host, self._port, self._ranks, self._own = host, port, ranks, own
        self._socket = socket.create_connection((host, port), timeout=20)
        self._lines = self._socket.makefile("rb")
        self._pool = ThreadPoolExecutor(ranks)
        self.groups: list[broadcast.Group] = []
        self.queued = 0

    def say(self, message: msgspec.Struct | bytes) -> None:
        self._socket.sendall(message if isinstance(message, bytes) else messages.encode(message))

    def hear(self, kind: type[Any]) -> Any:
        return messages.decode(self._lines.readline(), kind)

    def meet(self) -> messages.Meeting:
        self.say(messages.Hello(self._secret, self._ranks))
        meeting = self.hear(messages.Meeting)
        if not meeting.error:

            def join(rank: int) -> broadcast.Group:
                place = (meeting.backend, self._host, self._port, meeting.name)
                return broadcast.Group(*place, rank=rank, size=self._ranks + 1, address=self._own)

            self.groups = list(self._pool.map(join, range(1, self._ranks + 1)))
        return meeting

    def ask(self, version: int | str) -> messages.Offer:
        self.say(messages.Ask(f"v{version:08d}" if isinstance(version, int) else version))
        while (offer := self.hear(messages.Offer)).queued:
            self.queued += 1
        return offer

    def receive(self, offer: messages.Offer) -> list[dict[str, torch.Tensor]]:
        self.say(messages.Go())
        runs: list[Future[dict[str, torch.Tensor]]] = [
            self._pool.submit(lambda group=group: dict(broadcast.receive(group, offer, CPU)))
            for group in self.groups
        ]
        return [run.result(30) for run in runs]

    def close(self) -> None:
        for group in self.groups:
            group.close()
        self.groups = []
        self._lines.close()
        self._socket.close()
        self._pool.shutdown()


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def make(address: str, ranks: int = 1) -> Engine:
        made.append(Engine(address, ranks))
        return made[-1]

    yield make
    for one in made:
        one.close()


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
        for name, tensor in expected.items()
    )


@pytest.mark.parametrize("bucket", [1, 64, 4096, 1 << 20])
def test_buckets_hold_everything_once_and_aligned(bucket: int) -> None:
    names = {dtype: name for name, dtype in broadcast.DTYPES.items()}
    offered = [messages.Tensor(name, names[t.dtype], list(t.shape)) for name, t in tensors(1).items()]
    made = list(broadcast.buckets(offered, bucket))
    assert [tensor for one in made for tensor, _ in one] == offered
    for one in made:
        end = 0
        for tensor, offset in one:
            assert offset % 16 == 0
            assert offset >= end
            end = offset + tensors(1)[tensor.name].nbytes
        assert end <= bucket or len(one) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_of_every_engine_gets_the_same(
    folder: Path, engine: Callable[..., Engine], ranks: int
) -> None:
    with serving(folder, bucket=64) as address:
        one, two = engine(address, ranks), engine(address, ranks)
        for each in (one, two):
            assert each.meet().error == ""
        for version, each in ((1, one), (2, one), (2, two), (1, two)):
            offer = each.ask(version)
            assert [tensor.name for tensor in offer.tensors] == sorted(tensors(version))
            for found in each.receive(offer):
                assert same(found, tensors(version))
            assert each.hear(messages.Done) == messages.Done()


def test_what_cannot_be_sent_is_said(folder: Path, engine: Callable[..., Engine]) -> None:
    cut = folder / "v00000003"
    cut.mkdir()
    (cut / "model.safetensors").write_bytes((folder / "v00000001" / "model.safetensors").read_bytes()[:99])
    (folder / "v00000004").mkdir()
    save_file({"b": torch.zeros(2, dtype=torch.float64)}, folder / "v00000004" / "model.safetensors")
    with serving(folder) as address:
        one = engine(address)
        one.meet()
        assert one.ask(9).error == "v00000009: its files are not here"
        for outside in ("..", "../v00000001", "/etc", ".hidden", "", "v00000001/"):
            assert "its files are not here" in one.ask(outside).error
        assert "model.safetensors: " in one.ask(3).error
        assert "b has the type F64" in one.ask(4).error
        offer = one.ask(1)  # the connection is still usable
        assert same(one.receive(offer)[0], tensors(1))


def test_files_that_are_deleted_meanwhile_still_come(folder: Path, engine: Callable[..., Engine]) -> None:
    with serving(folder) as address:
        one = engine(address)
        one.meet()
        offer = one.ask(1)
        (folder / "v00000001" / "model.safetensors").unlink()
        assert same(one.receive(offer)[0], tensors(1))


def test_strangers_are_sent_away(
    folder: Path,
    engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sending, "HELLO_S", 0.3)
    with serving(folder) as address:
        wrong = engine(address.rpartition("/")[0] + "/guess")
        assert "wrong secret" in wrong.meet().error
        for said in (b"\n", b"GET / HTTP/1.1\r\n", b'{"secret": 1}\n', b"x" * 10_000, b""):
            stranger = engine(address)
            stranger.say(said)
            began = time.monotonic()
            with pytest.raises(TransferFailed):
                stranger.hear(messages.Meeting)
            assert time.monotonic() - began < 5
        for ranks in (0, 5000):
            crowd = engine(address, 1)
            crowd._ranks = ranks
            assert f"{ranks} ranks" in crowd.meet().error
        good = engine(address)
        assert good.meet().error == ""
        assert same(good.receive(good.ask(2))[0], tensors(2))
    assert "guess" not in capfd.readouterr().err


def test_a_stranger_cannot_join_or_fill_a_group(folder: Path, engine: Callable[..., Engine]) -> None:
    """By the port alone: no group's name can be guessed, and nothing that is sent is kept."""
    with serving(folder) as address:
        good = engine(address)
        good.meet()
        port = good._port
        for name in ("engine-1", "engine-2", "", "x" * 1000):
            with pytest.raises(TransferFailed, match="no such group"):
                rendezvous.connect(HOST, port, name, timedelta(seconds=5))
        for message in (messages.Key("set", "engine-1/0", b"x" * 4_000_000), messages.Key("get", "0/0")):
            stranger = engine(address)
            with suppress(OSError):
                stranger.say(message)
            with pytest.raises((TransferFailed, OSError)):
                stranger.hear(messages.Found)
        assert same(good.receive(good.ask(1))[0], tensors(1))


def test_a_group_s_memory_is_bounded(folder: Path, engine: Callable[..., Engine]) -> None:
    """A worker with the secret cannot fill the trainer's host either."""
    with serving(folder) as address:
        member = engine(address)
        meeting = member.meet()
        store, close = rendezvous.connect(HOST, member._port, meeting.name, timedelta(seconds=5))
        with pytest.raises(TransferFailed, match="too many keys"):
            list(map(store.set, map(str, range(64)), [b"x" * 500_000] * 64))
        close()
    table = rendezvous.Table()
    answers = [table.answer(messages.Key("set", str(i), b"")) for i in range(rendezvous.MOST_KEYS + 1)]
    assert [bool(answer.error) for answer in answers] == [False] * rendezvous.MOST_KEYS + [True]


def test_weights_that_were_changed_on_the_way_are_refused(
    folder: Path, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    broadcast_ = broadcast.Group.broadcast

    def changed(group: broadcast.Group, buffer: torch.Tensor) -> None:
        if group._group.rank() == 0 and buffer.numel():
            buffer = buffer.clone()
            buffer[-1] ^= 1
        broadcast_(group, buffer)

    with serving(folder, bucket=64) as address:
        one = engine(address)
        one.meet()
        monkeypatch.setattr(broadcast.Group, "broadcast", changed)
        with pytest.raises(TransferFailed, match="SHA-256"):
            one.receive(one.ask(1))


def test_the_sender_listens_on_one_port(folder: Path) -> None:
    with started(folder) as sender:
        assert sender._process is not None
        found = psutil.Process(sender._process.pid).net_connections("tcp")
        listening = [connection.laddr for connection in found if connection.status == psutil.CONN_LISTEN]
        assert len(listening) == 1
        assert f"{HOST}:{listening[0].port}" == sender._address.rpartition("/")[0]


def test_one_worker_that_hangs_holds_up_nobody(
    folder: Path, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "GO_S", 0.5)
    with serving(folder, turns=threading.BoundedSemaphore(1)) as address:
        absent = engine(address)  # gets the rendezvous, and never joins
        absent.say(messages.Hello(address.rpartition("/")[2], 1))
        absent.hear(messages.Meeting)
        slow, good = engine(address), engine(address)
        slow.meet()
        good.meet()
        slow.ask(1)  # has the only turn, and never sends Go
        began = time.monotonic()
        offer = good.ask(2)
        assert 0.2 < time.monotonic() - began < 5
        assert same(good.receive(offer)[0], tensors(2))
        with pytest.raises(TransferFailed):
            slow.hear(messages.Done)


def test_many_engines_leave_nothing_behind(folder: Path, engine: Callable[..., Engine]) -> None:
    def held() -> tuple[int, int]:
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    with serving(folder) as address:
        before = held()
        for _ in range(20):
            one = Engine(address)
            one.meet()
            one.receive(one.ask(1))
            one.close()
        deadline = time.monotonic() + 10
        while held() > before and time.monotonic() < deadline:
            time.sleep(0.1)
        assert held() <= before


def test_a_turn_that_hangs_ends_the_process(folder: Path, tmp_path: Path) -> None:
    """A worker frozen during a transfer; here the limit for a buffer is longer than that for a turn."""
    program = f"""
import sys
from datetime import timedelta
from pathlib import Path
from roq.weights import broadcast
from roq_trainer import sender
broadcast.MEET, broadcast.BUFFER, sender.TURN_S = timedelta(seconds=20), timedelta(seconds=100), 1.0
server = sender._Server({HOST!r}, Path({str(folder)!r}), "gloo", 2)
server.bucket = 64
print(f"{HOST}:{{server.server_address[1]}}/{{server.secret}}", flush=True)
server.serve_forever()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        frozen = Engine(process.stdout.readline().strip())
        frozen.meet()
        frozen.ask(1)
        frozen.say(messages.Go())  # and never receives
        _, said = process.communicate(timeout=20)
        frozen.close()
    assert process.returncode == 1
    assert "a transfer took longer than 1 s" in said


def test_one_that_hangs_is_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sched: Any = Announced()
    with started(folder) as sender:
        sender.announce(sched, "t0")
        hung = sender._process
        assert hung is not None
        monkeypatch.setattr(sending, "BEAT_S", 2.0)
        monkeypatch.setattr(sending, "RESTART_S", 0.0)
        for _ in range(8):  # it is alive, so it is not restarted
            time.sleep(0.4)
            sender.announce(sched, "t0")
        assert sender._process is hung
        os.kill(hung.pid, signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while len(sched.addresses) < 3 and time.monotonic() < deadline:
            time.sleep(0.1)
            sender.announce(sched, "t0")
        first, none, second = sched.addresses
        assert (none, first != second) == ("", True)
        sender.leave(sched, "t0")
        assert sched.addresses[-1] == ""


def test_what_nccl_logs_is_no_address(folder: Path) -> None:
    """NCCL logs to standard output, which must have only the address and the dots."""
    program = f"""
import os, sys
from roq_trainer import sender
class Server(sender._Server):
    def service_actions(self):
        os.write(1, b"NCCL INFO ...")
        super().service_actions()
sender._Server = Server
sender.main(["--folder", {str(folder)!r}, "--backend", "gloo", "--host", {HOST!r}])
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            assert re.fullmatch(rb"127\.0\.0\.1:\d+/[\w-]{32}\n", process.stdout.readline())
            assert process.stdout.read(3) == b"..."
            assert process.stderr.read(9) == b"NCCL INFO"
        finally:
            process.kill()


def test_a_line_that_drips_in_is_cut_off(
    folder: Path, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is for the whole line: single bytes do not extend it."""
    monkeypatch.setattr(sending, "GO_S", 1.0)
    with serving(folder, turns=threading.BoundedSemaphore(1)) as address:
        dripping, good = engine(address), engine(address)
        dripping.meet()
        good.meet()
        dripping.ask(1)

        def drip() -> None:
            with suppress(OSError):
                for _ in range(100):
                    dripping.say(b" ")
                    time.sleep(0.1)

        thread = threading.Thread(target=drip)
        thread.start()
        began = time.monotonic()
        assert same(good.receive(good.ask(2))[0], tensors(2))
        assert time.monotonic() - began < 5
        dripping._socket.close()
        thread.join()


def test_a_rendezvous_that_is_frozen_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel accepts, and no process answers."""
    monkeypatch.setattr(broadcast, "MEET", timedelta(seconds=1))
    with socket.create_server((HOST, 0)) as frozen:
        began = time.monotonic()
        port = frozen.getsockname()[1]
        with pytest.raises(TransferFailed, match=re.escape(f"{HOST}:{port}")):
            broadcast.Group("gloo", HOST, port, "x", rank=1, size=2, address=HOST)
        assert time.monotonic() - began < 3


def test_the_address_is_told_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failover may have lost the address."""
    sched: Any = Announced()
    with started(folder) as sender:
        sender.announce(sched, "t0")
        sender.announce(sched, "t0")
        assert len(sched.addresses) == 1
        monkeypatch.setattr(sending, "SERVED_S", 0.0)
        sender.announce(sched, "t0")
        assert len(sched.addresses) == 2
        assert len(set(sched.addresses)) == 1


def test_no_turn_is_said_in_time(
    folder: Path, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "QUEUE_S", 0.5)
    monkeypatch.setattr(sending, "QUEUED_S", 0.1)
    with serving(folder, turns=threading.BoundedSemaphore(1)) as address:
        slow, late = engine(address), engine(address)
        slow.meet()
        late.meet()
        offer = slow.ask(1)
        assert "still queued" in late.ask(1).error
        assert late.queued >= 3, "it is told that it waits"
        assert same(slow.receive(offer)[0], tensors(1))


class Announced:
    """A fake scheduler that records announcements."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    def announce_sender(self, address: str, trainer: str) -> None:
        if trainer != "t0":
            raise Fenced(f"{trainer} was superseded")
        self.addresses.append(address)


def test_over_ipv6(folder: Path) -> None:
    """The address in brackets; the ranks meet there too."""
    if not socket.has_ipv6 or not Path("/proc/net/if_inet6").read_text().strip():
        pytest.skip("no IPv6 on this machine")
    with started(folder, "::1") as sender:
        assert sender._address.startswith("[::1]:")
        one = Engine(sender._address, own="::1")
        one.meet()
        assert same(one.receive(one.ask(1))[0], tensors(1))
        one.close()


def test_the_process_is_announced_and_started_again(
    folder: Path, engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    sched: Any = Announced()
    with started(folder) as sender:
        sender.announce(sched, "t0")
        sender.announce(sched, "t0")
        (address,) = sched.addresses
        assert re.fullmatch(r"127\.0\.0\.1:\d+/[\w-]{32}", address)
        one = engine(address)
        one.meet()
        assert same(one.receive(one.ask(1))[0], tensors(1))
        process = sender._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        sender.announce(sched, "t0")  # too soon for another start
        assert sched.addresses == [address, ""]
        monkeypatch.setattr(sending, "RESTART_S", 0.0)
        deadline = time.monotonic() + 30
        while len(sched.addresses) < 3:
            began = time.monotonic()
            sender.announce(sched, "t0")
            assert time.monotonic() - began < 1, "the trainer does not wait for it"
            assert time.monotonic() < deadline
            time.sleep(0.05)
            monkeypatch.setattr(sending, "RESTART_S", 30.0)
        two = engine(sched.addresses[-1])
        assert two.meet().error == ""


def test_a_host_that_is_not_ours_is_a_configuration_error(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="ROQ_TRAINER_ADDRESS"):
        Sender("gloo", folder, "192.0.2.1").start()
    assert "cannot listen on 192.0.2.1" in capfd.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_is_a_configuration_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="GPU"):
        Sender("nccl", folder, HOST).start()


def test_it_ends_with_its_trainer(folder: Path) -> None:
    trainer = (
        "import sys, time; from pathlib import Path; from roq_trainer.sender import Sender\n"
        f"sender = Sender('gloo', Path({str(folder)!r}), '{HOST}'); sender.start()\n"
        "print(sender._process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", trainer], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.kill(pid, 0)
        process.kill()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("address", ["", "host", "host:1", "host:x/s", "/s", "host:1/", "host:99999/s"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(TransferFailed, match=re.escape(repr(address.rpartition("/")[0] or address))):
        messages.split_address(address)
