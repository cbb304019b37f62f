"""A weight-transfer backend for vLLM: from a Hugging Face folder, or from the trainer; in the engine process.

vLLM's own backend for NCCL has one group of a fixed size, which the trainer drives and all workers are in.
Here weights are files, read by any number of workers when they like, and where the trainer sends them, every
engine has a group of its own with it (roq/weights/broadcast.py) and asks when it is ready.
Named by ``worker_extension_cls``: importing this module registers the backend.

Not yet run on a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.inplace import reload_weights

from roq.processes import end_with
from roq.text import one_line
from roq.weights import broadcast
from roq.weights.messages import Offer
from roq.weights.safetensors import WeightFiles
from roq_worker import cpu
from roq_worker.receiver import Place
from roq_worker.vllm_start import BACKEND, WORKER

__all__ = ["Meeting", "Source", "Transfer", "WorkerExtension"]


Tensors = Generator[tuple[str, torch.Tensor]]


@dataclass
class Meeting(Place, WeightTransferInitInfo):
    """A :class:`Place`, as vLLM hands it on."""


@dataclass
class Source(WeightTransferUpdateInfo):
    """``path`` of the folder with the new weights, or the sender's ``offer`` (JSON) of what will come."""

    path: str = ""
    offer: bytes = b""


class Transfer(WeightTransferEngine[Meeting, Source]):
    """Loads tensors into the running model: all ``*.safetensors`` of a folder, or what the sender sends.

    The caller has checked names and shapes. After a failure the model holds some of the new weights; only
    another update, of all of them, makes it usable again.
    """

    init_info_cls = Meeting
    update_info_cls = Source

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._group: broadcast.Group | None = None
        self.written = False  # by the last update: the model may hold some of the new weights
        # The engine would outlive a killed worker for ever. With several ranks this is not the worker's
        # child but a grandchild; the process between ends with us.
        worker, _, mark = os.environ[WORKER].partition(" ")
        end_with(int(worker), mark)

    def init_transfer_engine(self, init_info: Meeting) -> None:
        self.shutdown()
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank + 1
        self._group = broadcast.Group(**asdict(init_info), rank=rank)

    def start_weight_update(self) -> None:
        pass

    def finish_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, str]) -> None:
        # The base class synchronizes an accelerator, which a CPU build refuses.
        self.receive_weights(self.parse_update_info(update_info))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def receive_weights(self, update_info: Source) -> None:
        self.written = False
        source = _read(Path(update_info.path)) if update_info.path else self._received(update_info.offer)
        with closing(source), closing(self._noted(source)) as tensors:
            try:
                # model.load_weights alone fails where layers are repacked after loading (oneDNN, quantized).
                reload_weights(self.vllm_config, self.model, tensors, None, is_checkpoint_format=True)
            except BaseException:
                # What came stays counted per layer, and would be taken for a part of the next update.
                finalize_layerwise_reload(self.model, self.model_config)
                raise
        cpu.refresh_tied_head(self.model)

    def _noted(self, tensors: Tensors) -> Tensors:
        for tensor in tensors:
            self.written = True
            yield tensor

    def _received(self, offer: bytes) -> Tensors:
        assert self._group is not None, "init_transfer_engine comes first"
        try:
            expected = msgspec.json.decode(offer, type=Offer)
            yield from broadcast.receive(self._group, expected, self.device)
        except BaseException:
            self.shutdown()  # a group that broke is never used again
            raise

    def shutdown(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()


def _read(folder: Path) -> Tensors:
    with WeightFiles(folder) as files:
        yield from files.items()


WeightTransferEngineFactory.register_engine(BACKEND, Transfer)


class WorkerExtension:
    """What the engine calls on every rank; naming it makes vLLM's workers import this module.

    No exception leaves these: vLLM raises the first rank's and leaves the others' answers in their queues,
    for the next call to find.
    """

    def roq_meet(self: Any, place: dict[str, Any]) -> str:
        """Meet the trainer's sender; says why when that failed. Generation stands still meanwhile."""
        try:
            self.init_weight_transfer_engine(place)
        except Exception as error:  # noqa: BLE001
            return one_line(error)
        return ""

    def roq_load(self: Any, source: dict[str, Any]) -> tuple[bool, str]:
        """Load a :class:`Source`; whether anything was written, and why it failed, if it did."""
        try:
            self.start_weight_update()
            self.update_weights(source)
            self.finish_weight_update()
        except Exception as error:  # noqa: BLE001
            return self.weight_transfer_engine.written, one_line(error)
        return True, ""
