"""Bad input: one plain line on stderr, exit code 2, nothing changed."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from roq.run.embedded_server import EmbeddedServer

Job = Callable[..., Path]


def no_weights(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()


def broken_off(folder: Path) -> None:
    file = folder / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-2])


def missing_shard(folder: Path) -> None:
    index = {"weight_map": {"w": "model-00001-of-00002.safetensors"}}
    (folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))


def odd_heads(folder: Path) -> None:
    (folder / "model" / "config.json").write_text('{"hidden_size": 48, "num_attention_heads": 2}')


def no_model(folder: Path) -> None:
    (folder / "model" / "config.json").unlink()


def broken_line(folder: Path) -> None:
    file = folder / "prompts.jsonl"
    lines = file.read_text().splitlines()
    lines[4] = lines[4][:-3]
    file.write_text("\n".join(lines))


def deep_line(folder: Path) -> None:
    with (folder / "prompts.jsonl").open("a") as file:
        file.write('{"prompt": "x", "answer": ' + "[" * 100_000 + "]" * 100_000 + "}\n")


def no_tokenizer(folder: Path) -> None:
    (folder / "model" / "tokenizer.json").unlink()


def failing_reward(folder: Path) -> None:
    (folder / "mine.py").write_text("import nothing_of_this_name\ndef score(item, text): return 0.0\n")


def good_reward(folder: Path) -> None:
    (folder / "mine.py").write_text("def score(item, text): return 0.0\n")


def long_prompt(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(settings))
    with (folder / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "a " * 1500, "answer": "a"}) + "\n")


def nothing(folder: Path) -> None:
    pass


CASES: dict[str, tuple[dict[str, Any], Callable[[Path], None], str]] = {
    "mistyped key": (
        {"protocol__batchsize": 3},
        nothing,
        "unknown key 'batchsize' in [protocol]; did you mean 'batch_size'",
    ),
    "mistyped section": (
        {"trainr__lr": 0.1},
        nothing,
        "unknown key 'trainr' in the file; did you mean 'trainer'",
    ),
    "wrong value": ({"protocol__eta": -1}, nothing, "protocol.eta"),
    "model without weights": ({}, no_weights, "the model folder has no weights"),
    "model broken off": ({}, broken_off, "copy or download it again"),
    "model with a shard missing": ({}, missing_shard, "model-00001-of-00002.safetensors"),
    "model without a configuration": ({}, no_model, "has no config.json"),
    "sequences longer than the trainer takes": (
        {"rollout__max_tokens": 5000},
        nothing,
        "trainer.max_seq_tokens = 2048 is less than",
    ),
    "model without a tokenizer": ({}, no_tokenizer, "the model folder has no tokenizer"),
    "NUL in a path": ({"model__path": "./a\0b"}, nothing, "model.path = './a\\x00b'"),
    "prompt line nested too deeply": ({}, deep_line, "prompts.jsonl, line 9: nested more than 64 deep"),
    "model folder missing": ({"model__path": "./nowhere"}, nothing, "there is no such folder"),
    "prompt too long": ({}, long_prompt, "has 1500 tokens, data.max_prompt_tokens is 1024"),
    "broken prompt line": ({}, broken_line, "prompts.jsonl, line 5"),
    "prompt file missing": ({"data__file": "none.jsonl"}, nothing, "none.jsonl: no such file"),
    "reward module missing": (
        {"reward__function": "no_such_module:f"},
        nothing,
        "'no_such_module' cannot be imported",
    ),
    "reward function missing": ({"reward__function": "mine:other"}, good_reward, "has no function 'other'"),
    "reward module failing": ({"reward__function": "mine:score"}, failing_reward, "nothing_of_this_name"),
}


def refused(done: Any, said: str) -> None:
    (line,) = done.stderr.splitlines()
    assert said in line
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_up_refuses(case: str, job: Job, folder: Path, roq: Callable[..., Any]) -> None:
    changes, spoil, said = CASES[case]
    file = job(**changes)
    spoil(folder)
    refused(roq("up", file), said)
    assert not (folder / "run").exists()


def test_up_refuses_a_head_size_that_the_cpu_engine_lacks(
    job: Job, folder: Path, roq: Callable[..., Any]
) -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("a GPU is here: vLLM's CPU backend is not what runs")
    file = job()
    odd_heads(folder)
    refused(roq("up", file), "does not support a head size of 24 on a CPU")
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    "case", ["mistyped key", "model without weights", "broken prompt line", "reward module missing"]
)
def test_init_refuses(case: str, job: Job, folder: Path, url: str, roq: Callable[..., Any]) -> None:
    changes, spoil, said = CASES[case]
    file = job(**changes)
    spoil(folder)
    refused(roq("init", file, "--redis", url), said)
    with redis.Redis.from_url(url) as c:
        assert c.dbsize() == 0


@pytest.mark.parametrize("command", ["up", "init"])
def test_a_server_that_evicts_is_refused(
    command: str, job: Job, folder: Path, url: str, roq: Callable[..., Any]
) -> None:
    with redis.Redis.from_url(url) as c:
        c.config_set("maxmemory-policy", "volatile-lru")
        refused(roq(command, job(redis__url=url)), "volatile-lru")
        assert c.dbsize() == 0
    assert not (folder / "run").exists()


def test_no_aof_is_a_warning(job: Job, url: str, roq: Callable[..., Any]) -> None:
    with redis.Redis.from_url(url) as c:
        c.config_set("appendonly", "no")
    done = roq("init", job(redis__url=url))
    assert done.returncode == 0
    assert "warning" in done.stderr
    assert "no append-only file" in done.stderr


def test_a_run_with_another_configuration_is_refused(job: Job, url: str, roq: Callable[..., Any]) -> None:
    assert roq("init", job(redis__url=url)).returncode == 0
    with redis.Redis.from_url(url) as c:
        before = {key: c.dump(key) for key in c.scan_iter()}
        other = roq("init", job(redis__url=url, protocol__eta=3, rollout__temperature=0.5))
        refused(other, "eta")
        assert "rollout.temperature" in other.stderr
        assert {key: c.dump(key) for key in c.scan_iter()} == before


def test_up_refuses_another_configuration_of_its_own_run(
    job: Job, folder: Path, roq: Callable[..., Any]
) -> None:
    server = EmbeddedServer(folder / "run")
    server.start()
    assert roq("init", job(), "--redis", server.url).returncode == 0
    server.stop()
    refused(roq("up", job(protocol__batch_size=3)), "batch_size")
    assert not server.alive, "the server that was started to look is stopped again"
    assert not (folder / "run" / "logs").exists()


def test_a_file_that_is_no_job(folder: Path, roq: Callable[..., Any]) -> None:
    refused(roq("up", folder / "none.toml"), "cannot be read")
    (folder / "bad.toml").write_text("[run\n")
    refused(roq("up", folder / "bad.toml"), "not valid TOML")


def test_init_refuses_a_prompt_that_is_too_long(job: Job, folder: Path, roq: Callable[..., Any]) -> None:
    """Before the server is asked for anything: there is none."""
    file = job()
    long_prompt(folder)
    refused(roq("init", file, "--redis", "redis://127.0.0.1:1", "--wait", "1"), "has 1500 tokens")


def test_not_a_safetensors_file(job: Job, folder: Path, roq: Callable[..., Any]) -> None:
    file = job()
    (folder / "model" / "model.safetensors").write_bytes(struct.pack("<Q", 2) + b"{]" + bytes(8))
    refused(roq("up", file), "not a safetensors file")
