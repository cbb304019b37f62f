"""Helpers for the trainer's tests: tiny models, invented batches, and a launcher for ranks."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roq.trajectory import Trajectory
from roq.types import Batch, BatchGroup, BatchMember

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
MODEL_TYPES = ("qwen3",)  # of every architecture in roq_trainer.models
VOCAB = 96
TEMPERATURE = 0.7


def make_model(folder: Path, *, tied: bool, model_type: str = "qwen3") -> Path:
    """A random Hugging Face model, saved as a model folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.1,
    )
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:  # norms of ones and biases of zeros would hide a mix-up
            parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def make_batch(
    version: int = 3, groups: int = 4, size: int = 3, seed: int = 1, longest: int = 17
) -> tuple[Batch, list[list[Trajectory]]]:
    """A batch and its payloads: lengths vary, segments span versions, log-probs are perturbed."""
    draw = random.Random(seed)
    described: list[BatchGroup] = []
    payloads: list[list[Trajectory]] = []
    for index in range(groups):
        prompt = [draw.randrange(VOCAB) for _ in range(draw.randint(2, 6))]
        members: list[Trajectory] = []
        for _ in range(size):
            n = draw.randint(1, longest)
            old = draw.randint(0, n - 1)
            segments = [(version - 1, old)] if old else []
            members.append(
                Trajectory(
                    prompt=prompt,
                    tokens=[draw.randrange(VOCAB) for _ in range(n)],
                    logprobs=[-draw.uniform(2.0, 7.0) for _ in range(n)],
                    segments=[*segments, (version, n - old)],
                    reward=draw.choice([0.0, 0.25, 1.0]),
                )
            )
        payloads.append(members)
        described.append(describe(index + 1, version, members))
    return Batch(version=version, groups=described), payloads


def describe(group: int, version: int, members: list[Trajectory]) -> BatchGroup:
    oldest = [t.oldest_version or 0 for t in members]
    return BatchGroup(
        group=group,
        ordinal=group,
        slot=group,
        v_traj=min(oldest),
        staleness=version - min(oldest),
        members=[
            BatchMember(member=i + 1, reward=t.reward, tokens=len(t), v_traj=oldest[i])
            for i, t in enumerate(members)
        ],
    )


def read_tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The scalars of a folder of event files: (step, value) by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def read_wandb(folder: Path) -> list[dict[str, Any]]:
    """What was logged into the offline runs of a folder, in order."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob("offline-run-*/*.wandb")):
        for data in _log_records(path.read_bytes()):
            record = Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows


def _log_records(data: bytes) -> Iterator[bytes]:
    """The records of a file in LevelDB's log format, which W&B writes behind a header of 7 bytes."""
    assert data[:4] == b":W&B"
    at, record = 7, b""
    while at < len(data):
        if 32768 - at % 32768 < 7:  # no room for a header is left in this block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)  # kinds: 1 whole, 2 first, 3 middle, 4 last
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def environment() -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "workers"), str(ROOT / "trainer"), str(HERE)]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def run_ranks(ranks: int, *command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run ``python -m …`` or a script, alone or on several ranks of torchrun."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*launcher, *command], env=environment(), timeout=timeout, capture_output=True, text=True, check=False
    )
