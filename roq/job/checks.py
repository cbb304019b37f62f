"""Checks of a job before anything is started or stored.

Every function raises :class:`ConfigError` on the first problem. None of them imports an engine.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

from roq.config import Job, Logging, RunConfig
from roq.errors import ConfigError
from roq.job.model_folder import is_hub_name
from roq.weights.safetensors import check_weights, read_json

__all__ = [
    "check_engines",
    "check_function",
    "check_job",
    "check_lengths",
    "check_logging",
    "check_model",
    "check_supply",
    "process_environment",
]

# vLLM 0.32: CPUAttentionBackend.get_supported_head_sizes
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
REWARD_IMPORT_S = 120.0


def check_engines() -> None:
    """Check that the packages of workers and trainer are installed, without importing them."""
    wanted = {"roq_worker": "worker", "vllm": "worker", "roq_trainer": "trainer", "megatron": "trainer"}
    missing = [name for name in wanted if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(sorted({wanted[name] for name in missing}))
        raise ConfigError(
            f"{', '.join(missing)} cannot be found by {sys.executable}; run `pip install '.[{extras}]'` "
            "(on a machine without a GPU worker-cpu instead of worker)"
        )


def check_job(job: Job, config_file: Path, *, engines_here: bool) -> None:
    """Check the model and the user's functions; ``engines_here``: workers will run on this machine."""
    length = job.data.max_prompt_tokens + job.rollout.max_tokens
    check_lengths(job)
    check_model(job.model.path, engines_here=engines_here, max_model_len=length)
    check_function("reward.function", job.reward.function, config_file)
    if job.protocol.post_process is not None:
        check_function("protocol.post_process", job.protocol.post_process, config_file)
    if engines_here:
        check_logging(job.logging)


def check_supply(protocol: RunConfig, prompts: int) -> str | None:
    """Check that there are prompts enough; returns a warning when they end before ``total_steps``.

    Args:
        protocol: the job's. prompts: how many prompts there are.

    Raises:
        ConfigError: there are not enough for one batch.
    """
    if protocol.epochs is None:
        return None
    prompts = protocol.prompts or prompts
    supply, batch = prompts * protocol.epochs, protocol.batch_size
    have = f"{prompts} prompts x {protocol.epochs} epochs" if protocol.epochs > 1 else f"{prompts} prompts"
    if supply < batch:
        raise ConfigError(
            f"{have} are fewer than protocol.batch_size = {batch}: not one step is possible; "
            "give more prompts or epochs, or lower batch_size"
        )
    if protocol.total_steps is not None and protocol.total_steps * batch > supply:
        return (
            f"{have} in batches of {batch} are enough for {supply // batch} steps, protocol.total_steps is "
            f"{protocol.total_steps}: it will end early; give more prompts or epochs, or lower total_steps"
        )
    return None


def check_lengths(job: Job) -> None:
    """Check that both engines take the longest sequences that the job allows.

    Raises:
        ConfigError: prompt and response may be longer than ``trainer.max_seq_tokens``, or
            ``rollout.engine.max_model_len``, together.
    """
    longest = job.data.max_prompt_tokens + job.rollout.max_tokens
    engine = job.rollout.engine.get("max_model_len")
    if isinstance(engine, int) and engine < longest:
        raise ConfigError(
            f"rollout.engine.max_model_len = {engine} is less than data.max_prompt_tokens + "
            f"rollout.max_tokens = {longest}; raise it or leave it out, or lower those"
        )
    if longest > job.trainer.max_seq_tokens:
        raise ConfigError(
            f"trainer.max_seq_tokens = {job.trainer.max_seq_tokens} is less than data.max_prompt_tokens + "
            f"rollout.max_tokens = {longest}; raise it, or lower those"
        )


def check_logging(logging: Logging) -> None:
    """Check that the enabled loggers are installed."""
    wanted = {"tensorboard": logging.tensorboard, "wandb": logging.wandb is not None}
    for package, asked in wanted.items():
        if asked and importlib.util.find_spec(package) is None:
            raise ConfigError(f"logging.{package} needs a package: pip install '.[{package}]'")


# ---- model ---------------------------------------------------------------------------------------


def check_model(path: str, *, engines_here: bool, max_model_len: int) -> None:
    """Check that a model folder has a suitable configuration, complete weights and a tokenizer.

    A name on the Hugging Face hub passes: the engines download it.

    Args:
        path: the folder. engines_here: vLLM will run on this machine, so it must support the head size.
        max_model_len: longest prompt + response, in tokens; the model must have at least as many positions.
    """
    if is_hub_name(path):
        return
    folder = Path(path)
    config = read_json(folder / "config.json")
    check_weights(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"{folder}: the model folder has no tokenizer; save one next to the weights")
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise ConfigError(f"{folder / 'config.json'}: text_config must be an object")
    text = cast("dict[str, Any]", text)
    positions = _number(folder, text, "max_position_embeddings")
    if positions is not None and positions < max_model_len:
        raise ConfigError(
            f"data.max_prompt_tokens + rollout.max_tokens = {max_model_len} is more than the "
            f"{positions} positions of the model in {folder}"
        )
    if engines_here and not Path("/proc/driver/nvidia").exists():
        _check_head_size(folder, text)


def _number(folder: Path, config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is not None and (not isinstance(value, int) or value < 1):
        raise ConfigError(f"{folder / 'config.json'}: {key} must be a positive whole number, not {value!r}")
    return value


def _check_head_size(folder: Path, text: dict[str, Any]) -> None:
    size = _number(folder, text, "head_dim")
    hidden = _number(folder, text, "hidden_size")
    heads = _number(folder, text, "num_attention_heads")
    if size is None and hidden and heads:
        size = hidden // heads
    if size is not None and size not in CPU_HEAD_SIZES:
        sizes = ", ".join(map(str, CPU_HEAD_SIZES))
        raise ConfigError(
            f"{folder}: vLLM does not support a head size of {size} on a CPU; it supports {sizes}"
        )


# ---- the user's functions --------------------------------------------------------------------------


def process_environment(config_file: Path) -> dict[str, str]:
    """The environment of workers and trainer: this one, plus modules next to the job file."""
    folder = str(config_file.resolve().parent)
    parts = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*parts, folder]), "PYTHONUNBUFFERED": "1"}


_TRY_IMPORT = """\
import sys
from roq.errors import RoqError
from roq.rewards import load_function
from roq.text import one_line
try:
    load_function(sys.argv[1], sys.argv[2])
except RoqError as error:
    sys.exit(one_line(error))
"""


def check_function(setting: str, function: str, config_file: Path) -> None:
    """Check in a separate process, as workers use, that a user's function can be imported."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _TRY_IMPORT, function, setting],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=REWARD_IMPORT_S,
            env=process_environment(config_file),
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{setting} = {function!r}: importing it took more than {REWARD_IMPORT_S:.0f} s"
        ) from None
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        error = lines[-1] if lines else f"exit code {done.returncode}"
        raise ConfigError(error if error.startswith(setting) else f"{setting} = {function!r}: {error}")
