"""A weight-transfer backend for vLLM, in the engine process: from a Hugging Face folder or from the trainer.

vLLM's NCCL backend has one group of fixed size with all workers, driven by the trainer. Here any number of
workers read files when they are ready; where the trainer sends weights, each engine has a separate group
with it (roq/weights/broadcast.py). ``worker_extension_cls`` names this module; importing it registers the
backend.

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
    """A :class:`Place` in the form that vLLM passes to :class:`Transfer`."""


@dataclass
class Source(WeightTransferUpdateInfo):
    """``path`` of the folder with the new weights, or the sender's ``offer`` (JSON)."""

    path: str = ""
    offer: bytes = b""


class Transfer(WeightTransferEngine[Meeting, Source]):
    """Load tensors into the running model: all ``*.safetensors`` of a folder, or those that are sent.

    The caller has checked names and shapes. After a failure the model may have some of the new weights;
    only a complete update makes it usable again.
    """

    init_info_cls = Meeting
    update_info_cls = Source

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._group: broadcast.Group | None = None
        self.written = False  # the last update wrote at least one tensor
        # Otherwise the engine would outlive a killed worker. With several ranks this is the worker's
        # grandchild; the process in between ends with this one.
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
                # model.load_weights fails where layers are repacked after loading (oneDNN, quantized).
                reload_weights(self.vllm_config, self.model, tensors, None, is_checkpoint_format=True)
            except BaseException:
                # Otherwise the tensors so far would count as part of the next update.
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
            self.shutdown()  # a broken group cannot be used again
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
    """Methods that the engine calls on every rank; naming this class makes vLLM's workers import the module.

    They must not raise: vLLM raises the first rank's exception and leaves the other answers in their queues,
    where the next call would read them.
    """

    def roq_meet(self: Any, place: dict[str, Any]) -> str:
        """Join a group with the trainer's sender; returns the error, or "". Stops generation."""
        try:
            self.init_weight_transfer_engine(place)
        except Exception as error:  # noqa: BLE001
            return one_line(error)
        return ""

    def roq_load(self: Any, source: dict[str, Any]) -> tuple[bool, str]:
        """Load a :class:`Source`; returns True if anything was written, and the error, or ""."""
        try:
            self.start_weight_update()
            self.update_weights(source)
            self.finish_weight_update()
        except Exception as error:  # noqa: BLE001
            return self.weight_transfer_engine.written, one_line(error)
        return True, ""
