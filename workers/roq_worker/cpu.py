"""Workarounds for vLLM without CUDA. With CUDA, every function here does nothing."""

from __future__ import annotations

import os
from typing import Any

__all__ = ["engine_arguments", "refresh_tied_head", "set_environment"]


def _cpu_only() -> bool:
    import torch

    return not torch.cuda.is_available()


def set_environment() -> None:
    """Set variables that the engine process inherits; call it before vLLM is imported.

    vLLM binds OpenMP threads to cores by default. Next to a busy process (the trainer, a second
    worker) a step with bound threads takes 30-110 ms instead of 5.5 ms, so there is one unbound thread.
    ``VLLM_ENABLE_V1_MULTIPROCESSING``: otherwise vLLM replaces the "uni" executor of
    :func:`engine_arguments`; AsyncLLM still has its engine process. ``TORCH_COMPILE_DISABLE``: one function
    of vLLM's sampler is compiled despite ``enforce_eager``, and without a C++ compiler the engine dies.
    """
    if _cpu_only():
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")


def engine_arguments(max_model_len: int, *, several_ranks: bool) -> dict[str, Any]:
    """Engine arguments that the configuration's ``rollout.engine`` may override.

    ``enforce_eager``: compiling takes 31 s and gains nothing here. ``block_size`` 32: prefix-cache
    hits on short prompts. The KV cache would otherwise take a share of the whole machine's memory,
    and "mp", vLLM's default executor here, starts another process of 0.5 GB for the only rank.
    ``enable_chunked_prefill``: a seeded request whose prefill is split crashes vLLM 0.32 ("CPU
    Generator does not use offset"), which happens when many resume after a weight swap; without chunks
    a step must have room for the longest request.
    """
    if not _cpu_only():
        return {}
    return {
        "enforce_eager": True,
        "block_size": 32,
        "kv_cache_memory_bytes": 256 << 20,
        "distributed_executor_backend": "mp" if several_ranks else "uni",
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(4096, max_model_len),
    }


def refresh_tied_head(model: Any) -> None:
    """Repack the output layer after the embedding that it shares has changed.

    oneDNN keeps a packed copy of every linear layer. With tied embeddings no tensor named lm_head
    is loaded, so its copy would keep the old weights, silently (log-probs off by 4 to 6).
    """
    if not _cpu_only():
        return
    for module in model.modules():
        embedding = getattr(module, "embed_tokens", None)
        head = getattr(model, "lm_head", None)
        if embedding is not None and head is not None:
            if head is embedding or getattr(head, "weight", None) is getattr(embedding, "weight", None):
                head.quant_method.process_weights_after_loading(head)
            return
