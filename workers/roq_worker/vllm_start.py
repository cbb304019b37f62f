"""Start vLLM: its arguments, its environment, and the translation of its failures."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from roq.config import Rollout
from roq.errors import ConfigError, EngineError
from roq.job.checks import check_model
from roq.job.model_folder import find_model
from roq.processes import start_mark
from roq.text import one_line
from roq.weights.safetensors import Shapes, read_json, read_shapes
from roq_worker import cpu

__all__ = ["BACKEND", "WORKER", "start_vllm"]

BACKEND = "roq"  # the weight-transfer backend that roq_worker.weight_transfer registers
WORKER = "ROQ_WORKER_PROCESS"  # the worker with which the engine's processes end: "pid mark"


def start_vllm(
    location: str, version: int, rollout: Rollout, *, dtype: str, max_model_len: int
) -> tuple[Any, Shapes, bool]:
    """Start vLLM with a Hugging Face folder or hub name. Blocks for seconds to minutes.

    Returns:
        The ``AsyncLLM``, the shape of every tensor of the model, and whether its embeddings are tied.

    Raises:
        ConfigError: the model or the engine arguments cannot work.
        EngineError: vLLM did not start.
    """
    cpu.set_environment()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # it warns of addresses without a name
    os.environ[WORKER] = f"{os.getpid()} {start_mark(os.getpid())}"
    # The worker has threads (the heartbeat); forking could deadlock the child.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    if rollout.engine.get("data_parallel_size", 1) != 1:
        raise ConfigError("rollout.engine.data_parallel_size: not supported; start several workers instead")
    folder = _started_from(location, version)
    check_model(str(folder), engines_here=True, max_model_len=max_model_len)
    shapes = read_shapes(folder)
    tied = bool(read_json(folder / "config.json").get("tie_word_embeddings"))
    parallel = ("tensor_parallel_size", "pipeline_parallel_size")
    several_ranks = any(rollout.engine.get(size, 1) != 1 for size in parallel)
    arguments: dict[str, Any] = {
        "model": str(folder),
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": rollout.max_concurrency,
        "logprobs_mode": "processed_logprobs",  # after temperature: the distribution that was sampled
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **cpu.engine_arguments(max_model_len, several_ranks=several_ranks),
        **rollout.engine,
        "worker_extension_cls": "roq_worker.weight_transfer.WorkerExtension",
    }
    return _start(arguments), shapes, tied


def _start(arguments: dict[str, Any]) -> Any:
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments["weight_transfer_config"] = WeightTransferConfig(backend=BACKEND)
    try:
        engine_args = AsyncEngineArgs(**arguments)
        config = engine_args.create_engine_config()
    except (TypeError, ValueError) as error:  # pydantic's error is a ValueError
        raise ConfigError(f"vLLM rejects the model or [rollout.engine]: {one_line(error)}") from error
    try:
        return AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    except Exception as error:
        raise EngineError(f"vLLM did not start: {one_line(error)}; see its log") from error


def _started_from(location: str, version: int) -> Path:
    if version > 0 and not Path(location).is_dir():
        raise ConfigError(
            f"{location}: the weights of version {version} are not on this host; mount that folder under "
            "the same path, or see docs/deploy.md for other ways to share weights"
        )
    return find_model(location)
