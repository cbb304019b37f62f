"""Workarounds for Megatron without CUDA. With CUDA, every function here does nothing.

megatron-core asks for ``torch.cuda.current_device()``, writes ``device="cuda"`` and ``.cuda()``, and
checks for ``torch.cuda.FloatTensor``, although its mathematics is plain PyTorch. Inside
:func:`megatron_device` these refer to the CPU.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["BACKEND", "HAVE_CUDA", "megatron_device", "use_one_thread"]

HAVE_CUDA: bool = torch.cuda.is_available()
BACKEND: str = "cpu:gloo,cuda:nccl" if HAVE_CUDA else "gloo"

_CPU = torch.device("cpu")


def _is_cuda(value: object) -> bool:
    return (isinstance(value, str) and value.startswith("cuda")) or (
        isinstance(value, torch.device) and value.type == "cuda"
    )


class _CudaMeansCpu(TorchFunctionMode):
    """Redirect calls that name the CUDA device to the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not options:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(options.get("device")):
            options["device"] = _CPU
        if func is torch.Tensor.to:
            args = tuple(_CPU if _is_cuda(value) else value for value in args)
        return func(*args, **options)


def use_one_thread() -> None:
    """Use one thread unless ``OMP_NUM_THREADS`` is set, as torchrun does.

    Next to busy rollout workers, threads that wait for each other make a step three times slower.
    """
    if not HAVE_CUDA and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


@contextlib.contextmanager
def megatron_device() -> Iterator[None]:
    """The context in which Megatron must be built and run."""
    if HAVE_CUDA:
        yield
        return
    saved = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    try:
        with _CudaMeansCpu():
            yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = saved  # type: ignore[assignment]
