"""A small job, and the model that it trains."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests import waiting

EXAMPLES = Path(__file__).parents[2] / "examples"

JOB = """
[run]
name = "e2e"
dir = "run"
seed = 3
transfer = "{transfer}"

[protocol]
eta = 1
batch_size = {batch}
group_size = 4
{protocol}
total_steps = {steps}
lease_s = {lease_s}

[model]
path = "base"

[data]
dataset = "gcd"
size = 200
max_prompt_tokens = 64
settings = {{ min_numbers = 2, max_numbers = 2, min_value = 2, max_value = 40 }}

[rollout]
workers = {workers}
max_concurrency = 16
max_tokens = 96
save_prefix_every_s = 0.5
kv_on_swap = "{kv}"
stop = ["</answer>"]

[trainer]
lr = 1e-4
micro_batch_size = 16
max_seq_tokens = 192
checkpoint_every = 2
{trainer}
"""


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model after a few warm-up steps."""
    folder = tmp_path_factory.mktemp("model") / "base"
    command = [sys.executable, str(EXAMPLES / "make_base_model.py"), "--out", str(folder), "--steps", "40"]
    subprocess.run(command, check=True, timeout=200)
    return folder


until = partial(waiting.until, seconds=150)
