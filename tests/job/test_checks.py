"""Input from outside that once gave a traceback or left things half done, each with all of its kind."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roq import AsyncScheduler, ConfigError, Invalid, NotAllowed, RoqError, RunConfig, Scheduler, load_job
from roq.admin.server import check_server
from roq.config import Data
from roq.job.checks import check_model
from roq.job.prompts import load_prompts
from roq.observe.metrics_log import Records
from roq.observe.plot import write_plot
from roq.observe.summary import summarize, summary_lines
from roq.processes import unique_name
from roq.types import Status
from tests.conftest import Server

CONFIG = RunConfig(eta=1, batch_size=2, prompts=8)

# ---- prompts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [64, 300, 900, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_nested_prompts(tmp_path: Path, depth: int, opening: str, closing: str) -> None:
    inner = "0" if opening != "[" else ""
    (tmp_path / "p.jsonl").write_text(
        f'{{"prompt":"x","answer":{opening * depth}{inner}{closing * depth}}}\n'
    )
    with pytest.raises(ConfigError, match=r"p\.jsonl, line 1: nested more than 64 deep"):
        load_prompts(Data(file=str(tmp_path / "p.jsonl")))


def test_what_is_nested_less_is_fine(tmp_path: Path) -> None:
    deep = "[" * 60 + "]" * 60
    (tmp_path / "p.jsonl").write_text(f'{{"prompt":"x","answer":{deep}}}\n')
    assert len(load_prompts(Data(file=str(tmp_path / "p.jsonl")))) == 1


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b"9" * 5000, b'{"prompt": 1e', b'"text"', b"\0", b'{"prompt":"\xed\xa0']
)
def test_lines_that_are_no_rows(tmp_path: Path, line: bytes) -> None:
    (tmp_path / "p.jsonl").write_bytes(line + b"\n")
    with pytest.raises(ConfigError, match=r"line 1: (not valid JSON|must be a JSON object)"):
        load_prompts(Data(file=str(tmp_path / "p.jsonl")))


# ---- model folders -------------------------------------------------------------------------------


def weights(header: Any) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(4)


WHOLE = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "num_attention_heads": 2}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(weights(WHOLE))
    check_model(str(tmp_path), engines_here=True, max_model_len=100)
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[]",
        b"3",
        DEEP,
        b"9" * 5000,
        b'{"text_config": 3}',
        b'{"text_config": null}',
        b'{"text_config": ["hidden_size"]}',
        b'{"hidden_size": "64", "num_attention_heads": 2}',
        b'{"hidden_size": 64, "num_attention_heads": 0}',
        b'{"hidden_size": 64, "num_attention_heads": 2.5}',
        b'{"hidden_size": 64, "num_attention_heads": -2}',
        b'{"head_dim": {}}',
        b'{"head_dim": NaN}',
        b'{"max_position_embeddings": "many"}',
        b'{"max_position_embeddings": 99}',
    ],
)
def test_odd_configurations(model: Path, text: bytes) -> None:
    (model / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=r"config\.json|positions"):
        check_model(str(model), engines_here=True, max_model_len=100)


@pytest.mark.parametrize(
    "index",
    [
        b"",
        b"[]",
        DEEP,
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": null}',
        b'{"weight_map": "model.safetensors"}',
        b'{"weight_map": {"w": 3}}',
        b'{"weight_map": {"w": null}}',
        b'{"weight_map": {"w": ["model.safetensors"]}}',
        b'{"weight_map": {"w": "../model.safetensors"}}',
        b'{"weight_map": {"w": "/etc/passwd"}}',
        b'{"weight_map": {"w": "a\\u0000b.safetensors"}}',
        b'{"weight_map": {"w": "other.safetensors"}}',
    ],
)
def test_odd_indexes(model: Path, index: bytes) -> None:
    (model / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(ConfigError, match=r"index\.json"):
        check_model(str(model), engines_here=False, max_model_len=100)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        bytes(7),
        struct.pack("<Q", 2**63) + bytes(50),
        struct.pack("<Q", 2**40) + bytes(50),
        weights(DEEP),
        weights([]),
        weights({"w": 3}),
        weights({"w": {"data_offsets": []}}),
        weights({"w": {"data_offsets": [0, "x"]}}),
        weights({"w": {"data_offsets": [0, None]}}),
        weights({"w": {"data_offsets": [0, 1e999]}}),
        weights({"w": {"data_offsets": [0, 400]}}),
        weights(b"\xff\xff"),
    ],
)
def test_odd_weights(model: Path, data: bytes) -> None:
    (model / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        check_model(str(model), engines_here=False, max_model_len=100)


def test_a_model_without_a_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer"):
        check_model(str(model), engines_here=False, max_model_len=100)


# ---- job files -----------------------------------------------------------------------------------

JOB = """
[run]
name = "demo"
dir = "run"
[protocol]
eta = 1
batch_size = 2
[model]
path = "model"
[data]
file = "p.jsonl"
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"run"', '"r\\u0000n"'),
        ('"run"', '""'),
        ('"run"', '"~nobody-of-this-name/run"'),
        ('"model"', '"./mo\\u0000del"'),
        ('"model"', '"mo\\u0000del"'),
        ('"model"', '"~nobody-of-this-name"'),
        ('"p.jsonl"', '"p\\u0000.jsonl"'),
        ('"demo"', '"de mo"'),
        ('"demo"', '"{demo}"'),
        ('"demo"', '"d\\u0000"'),
        ('"demo"', '"' + "d" * 65 + '"'),
        ('"demo"', '"é"'),
        ("eta = 1", "eta = " + "[" * 5000 + "]" * 5000),
        ("eta = 1", "eta = 1\0"),
    ],
)
def test_job_files_that_cannot_be(tmp_path: Path, old: str, new: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(JOB)
    load_job(file)
    file.write_text(JOB.replace(old, new))
    with pytest.raises(ConfigError):
        load_job(file)


def test_a_job_file_that_is_no_path() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_job("a\0b")


# ---- records -------------------------------------------------------------------------------------


JUNK = (
    b"",
    b"\xff\xfe",
    b"null",
    b"[]",
    b"3",
    DEEP,
    b"9" * 5000,
    b"{}",
    b'{"step": null}',
    b'{"step": "one", "time": "one"}',
    b'{"step": -1, "time": -1}',
    b'{"step": 0}',
    b'{"step": 1e300, "time": 1e300}',
    b'{"step": 1, "time": "noon"}',
    b'{"step": 1, "time": NaN, "wall_s": 1}',
    b'{"step": 1, "time": 1, "wall_s": Infinity}',
    b'{"step": 1, "time": 1, "wall_s": {}}',
    b'{"step": 1, "time": 1, "tokens": -5, "groups": -1}',
    b'{"step": 1, "time": 1, "tokens": 1e400, "rss_bytes": 1e400}',
    b'{"step": 1, "staleness/counts": {"a": 1}}',
    b'{"step": 1, "staleness/counts": {"-1": 1}}',
    b'{"step": 1, "staleness/counts": {"999999999": 1}}',
    b'{"step": 1, "staleness/counts": [1]}',
    b'{"step": 1, "reward/mean": Infinity}',
    b'{"step": 1, "reward/mean": "high"}',
    b'{"step": 1, "time/step": -Infinity}',
)


def test_junk_in_the_records(tmp_path: Path) -> None:
    """It is passed over: what is beside it is summed up and drawn."""
    good = {
        "metrics.jsonl": b'{"step": 1, "time": 10, "wall_s": 5, "reward/mean": 0.5, "loss": NaN}',
        "workers/w.jsonl": b'{"time": 10, "wall_s": 5, "tokens": 50}',
    }
    for number, junk in enumerate((*((line,) for line in JUNK), JUNK)):
        folder = tmp_path / str(number)
        (folder / "workers").mkdir(parents=True)
        for file, content in good.items():
            (folder / file).write_bytes(b"".join(line + b"\n" for line in (*junk, content)))
        records = Records(folder)
        records.read()
        summary = summarize(records, Status(run="demo", version=1), CONFIG, [], None)
        assert summary.tokens_per_s == 10, junk
        assert summary.reward_first5 == 0.5, junk
        assert dict(summary_lines(summary))["time"] == "5.0 s, 10 tokens/s"
    assert write_plot(records, summary, folder) is not None


# ---- names and sizes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["", "a b", "a:b", "{a}", "a}b", "a*", "a\0", "a\n", "é", "-a", "a" * 65, "\ud800"]
)
def test_names_of_runs(name: str) -> None:
    for kind in (Scheduler, AsyncScheduler):
        with pytest.raises(ConfigError, match="run = "):
            kind("redis://h", name)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a\0", "a\n", "é", "-a", "a" * 129, "\ud800"])
def test_names_of_workers_and_trainers(sched: Scheduler, name: str) -> None:
    sched.create(CONFIG, weights="w")
    calls: list[Callable[[], object]] = [
        lambda: sched.reserve(name, 0, 1),
        lambda: sched.renew(name),
        lambda: sched.pin(name),
        lambda: sched.leave(name),
        lambda: sched.take(name),
        lambda: sched.publish(1, "w", name),
        lambda: sched.announce_sender("h:1/s", name),
        lambda: sched.checkpointed(0, name),
        lambda: sched.retire_weights(name, 1),
    ]
    for call in calls:
        with pytest.raises(Invalid):
            call()
    assert sched.status().workers == []


@pytest.mark.parametrize("prefix", ["a b", "a:", "é", "-", "\0", "a" * 33])
def test_prefixes_of_names(prefix: str) -> None:
    with pytest.raises(ConfigError, match="a name's prefix must be letters"):
        unique_name(prefix)


def test_odd_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("", "my host!", "ü", "h" * 300, "..."):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        name = unique_name("gpu-")
        assert len(name) <= 128
        assert name.startswith("gpu-")
        assert name.replace("-", "").replace(".", "").isascii()


def test_sizes_are_limited(sched: Scheduler) -> None:
    sched.create(CONFIG, weights="w")
    big = "x" * 20_000
    for info in ({"say": big}, {"say": object()}, {"say": {1, 2}}):
        with pytest.raises(Invalid, match="info"):
            sched.renew("w0", 0, info)
    with pytest.raises(Invalid, match="metrics"):
        sched.publish(1, "w", "t0", {str(i): 0.5 for i in range(1000)})
    for weights_at in (big, "a\0b", "\ud800"):
        with pytest.raises(Invalid):
            sched.publish(1, weights_at, "t0")
    with pytest.raises(Invalid, match="settings"):
        Scheduler(sched.url, "other").create(CONFIG, settings={"a.b": "x" * (2 << 20)})
    (claim,) = sched.reserve("w0", 0, 1).reservations
    sched.fail(claim, "\ud800" + big * 100)
    worker = sched.status().workers[0]
    assert worker.error is not None
    assert len(worker.error) <= 2000
    assert sched.verify() == []


# ---- clients and servers -------------------------------------------------------------------------


def test_a_second_event_loop(server: Server) -> None:
    sched = AsyncScheduler(server.url, "test", retry_s=1)

    async def use(close: bool) -> None:
        await sched.create(CONFIG)
        await asyncio.gather(*(sched.status() for _ in range(100)))
        assert await sched.wait(0, 0.01) >= 0
        if close:
            await sched.aclose()

    asyncio.run(use(close=True))
    asyncio.run(use(close=True))  # closed, it is as new

    async def in_another_loop() -> None:
        await use(close=False)
        for call in (sched.status, lambda: sched.wait(0, 0.01)):
            with pytest.raises(RoqError, match=r"another event loop.*aclose\(\)"):
                await asyncio.to_thread(asyncio.run, call())
        await sched.aclose()

    asyncio.run(in_another_loop())


def test_a_user_that_may_not_ask(server: Server) -> None:
    server.redis.execute_command("ACL", "SETUSER", "deaf", "reset", "on", ">pw", "~*", "+@all", "-info")
    url = f"{server.url}?username=deaf&password=pw"
    with pytest.raises(NotAllowed, match="allow it INFO"):
        check_server(url)
    with pytest.raises(NotAllowed), Scheduler(url, "test") as sched:
        sched.create(CONFIG)
