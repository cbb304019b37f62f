"""A weight-transfer backend for vLLM that reads a Hugging Face folder; runs in the engine process.

vLLM's own backends move weights between GPUs (nccl, ipc, …). roq publishes weights as files, which
any number of workers read when they like, so that no worker holds a session with the trainer.
Named by ``worker_extension_cls``: importing this module registers the backend.

Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from roq._orphans import watch_parent
from roq_worker import _cpu
from roq_worker.engine import BACKEND

__all__ = ["FileTransfer", "Folder", "NoInit", "WorkerExtension"]


@dataclass
class NoInit(WeightTransferInitInfo):
    """Nothing to agree on before the first update."""


@dataclass
class Folder(WeightTransferUpdateInfo):
    """``path`` of the folder that holds the new weights."""

    path: str


class FileTransfer(WeightTransferEngine[NoInit, Folder]):
    """Loads all ``*.safetensors`` of a folder into the running model.

    The caller has checked names and shapes: a failure after the first write bricks the engine.
    """

    init_info_cls = NoInit
    update_info_cls = Folder

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        watch_parent()  # the engine process would outlive a killed worker for ever

    def init_transfer_engine(self, init_info: NoInit) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, str]) -> None:
        # The base class synchronizes an accelerator, which a CPU build refuses.
        self.receive_weights(self.parse_update_info(update_info))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def receive_weights(self, update_info: Folder) -> None:
        # All files are opened (mapped) before the first write: deleting them later does no harm.
        files = [
            safe_open(file, framework="pt") for file in sorted(Path(update_info.path).glob("*.safetensors"))
        ]

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for file in files:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    yield name, file.get_tensor(name)

        # model.load_weights alone fails where layers are repacked after loading (oneDNN, quantized).
        reload_weights(self.vllm_config, self.model, tensors(), weights_path=None, is_checkpoint_format=True)
        _cpu.refresh_tied_head(self.model)

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)


class WorkerExtension:
    """Adds nothing to vLLM's worker; naming it makes the engine process import this module."""
