"""Make the tiny model that the demo job trains: a short supervised warm-up, no download.

    python examples/make_base_model.py --out models/base

The task is reasoning-gym's ``gcd``: the greatest common divisor of two numbers up to 40. A careful
response is Euclid's algorithm by subtraction, one state after another, then the answer in the tags that
reasoning-gym's ``extract_answer`` looks for:

    Find the Greatest Common Divisor (GCD) of these numbers: 38, 6. Give only the GCD as your final answer.
    38 6, 32 6, 26 6, 20 6, 14 6, 8 6, 2 6, 2 4, 2 2<answer> 2</answer>

The number of steps has a heavy tail: 6 for the median pair, up to 39.

The warm-up texts are deliberately mixed, like scraped text: a share of ``CAREFUL`` is worked to the end, the
rest is one of the ``SLOPPY`` kinds (a bare guess; work that stops early and answers with the smaller number
so far), and the prompt does not say which kind follows. The base model imitates all of them, and its
arithmetic is not yet reliable, so at temperature 1 it is right about three times in ten. GRPO has to
discover, through the data set's own scorer, what earns the reward: working to the end and subtracting
without mistakes. That scorer gives partial credit when the right answer is a part of the given text
(answering 12 where 2 is right earns 0.5); the demo uses it unchanged.

The model is a Qwen3 of half a million parameters (untied embeddings, float32) in the Hugging Face layout.
Its tokenizer is a byte-level BPE trained on the same texts: any text round-trips, a frequent number of up to
three digits is one token, and the vocabulary is padded to a multiple of 64 so that tensor parallelism can
split it. One CPU core is enough; with two it takes about a minute.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import reasoning_gym
import torch
from reasoning_gym.utils import extract_answer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TASK = {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 40}
CAREFUL = 0.25
SLOPPY = ("guess", "stop_early")
WARM_UP_SEED = 1_000_000  # the job's prompts come from another seed; with 1,521 pairs in all, most recur

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 128, 2, 4, 2, 32, 384
BATCH = 32  # sequences in a warm-up step
LR = 3e-3
MEASURED = 256  # responses sampled at the end to say what the model can do
MAX_NEW_TOKENS = 128  # as in the job file: 39 steps take 121
SETTINGS_FILE = "base_model.json"  # written last: a folder without it is incomplete


# ---------------------------------------------------------------------------------------------
# Texts


def respond(a: int, b: int, kind: str, rng: random.Random) -> str:
    """One way of finding the greatest common divisor of ``a`` and ``b``: ``careful`` or one of ``SLOPPY``."""
    if kind == "guess":  # no steps
        return f"<answer> {rng.choice((1, 2, 3, 4, 5, 6))}</answer>"
    states = [(a, b)]
    while a != b:
        a, b = (a - b, b) if a > b else (a, b - a)
        states.append((a, b))
    if kind == "stop_early":
        states = states[: rng.randrange(len(states)) + 1]
        a, b = states[-1]
    return ",".join(f" {x} {y}" for x, y in states) + f"<answer> {min(a, b)}</answer>"


def texts(seed: int) -> Iterator[tuple[str, str]]:
    """Endless (question, response) pairs of the warm-up mixture."""
    rng = random.Random(seed)
    data = reasoning_gym.create_dataset("gcd", seed=WARM_UP_SEED * (seed + 1), size=10**6, **TASK)
    for item in data:
        a, b = item["metadata"]["numbers"]
        kind = "careful" if rng.random() < CAREFUL else rng.choice(SLOPPY)
        yield item["question"], respond(a, b, kind, rng)


# ---------------------------------------------------------------------------------------------
# Tokenizer and model


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on warm-up texts; a number is at most three digits a token."""
    source = texts(seed=0)
    corpus = ["".join(next(source)) for _ in range(2000)]
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?\p{N}{1,3}| ?\p{L}+| ?[^\s\p{L}\p{N}]|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|bos|>", "<|eos|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        show_progress=False,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in ("<answer>", "</answer>")])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=special[0],
        bos_token=special[1],
        eos_token=special[2],
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A freshly initialised Qwen3; embeddings untied, vocabulary padded to a multiple of 64."""
    config = Qwen3Config(
        vocab_size=math.ceil(len(tokenizer) / 64) * 64,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.04,
        pad_token_id=token_id(tokenizer, "pad"),
        bos_token_id=token_id(tokenizer, "bos"),
        eos_token_id=token_id(tokenizer, "eos"),
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def token_id(tokenizer: PreTrainedTokenizerFast, name: str) -> int:
    """The id of the ``pad``, ``bos`` or ``eos`` token."""
    found = getattr(tokenizer, f"{name}_token_id")
    assert isinstance(found, int)
    return found


# ---------------------------------------------------------------------------------------------
# Warm-up


def batches(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless (input ids, labels), each [BATCH, T] int64; labels are -100 outside responses.

    Sequences of similar length are batched together, which halves the padding.
    """
    source, rng = texts(seed + 1), random.Random(seed)
    while True:
        rows: list[tuple[list[int], list[int]]] = []
        pairs = [next(source) for _ in range(16 * BATCH)]
        prompts = tokenizer([question for question, _ in pairs])["input_ids"]
        answers = tokenizer([response for _, response in pairs])["input_ids"]
        for prompt, answer in zip(prompts, answers, strict=True):
            answer = [*answer, token_id(tokenizer, "eos")]
            rows.append((prompt + answer, [-100] * len(prompt) + answer))
        rows.sort(key=lambda row: len(row[0]))
        chunks = [rows[i : i + BATCH] for i in range(0, len(rows), BATCH)]
        rng.shuffle(chunks)
        for chunk in chunks:
            ids = [torch.tensor(row) for row, _ in chunk]
            labels = [torch.tensor(row) for _, row in chunk]
            pad = torch.nn.utils.rnn.pad_sequence
            yield pad(ids, True, token_id(tokenizer, "pad")), pad(labels, True, -100)


def warm_up(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int, bar: Progress
) -> float:
    """Train ``model`` in place for ``steps`` batches; returns the last smoothed loss in nats a token."""
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.98))
    ramp = max(1, min(50, steps // 4))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda s: min(1, (s + 1) / ramp) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * s / steps))),
    )
    task = bar.add_task("warm-up", total=steps, loss="")
    loss_mean, told_at = math.nan, time.monotonic()
    if not bar.console.is_terminal:
        bar.console.print(f"warm-up: {steps} steps, about a minute on two idle cores")
    model.train()
    for step, (ids, labels) in zip(range(steps), batches(tokenizer, seed), strict=False):
        hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
        target = labels[:, 1:]
        kept = target != -100
        loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[kept]), target[kept])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        loss_mean = loss.item() if step == 0 else 0.95 * loss_mean + 0.05 * loss.item()
        bar.update(task, advance=1, loss=f"loss {loss_mean:.3f}")
        if not bar.console.is_terminal and (time.monotonic() - told_at >= 10 or step + 1 == steps):
            told_at = time.monotonic()
            bar.console.print(f"warm-up {step + 1}/{steps}, loss {loss_mean:.3f}")
    return loss_mean


# ---------------------------------------------------------------------------------------------
# Measurement


@torch.no_grad()
def measure(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> dict[str, float]:
    """Sample responses at temperature 1 and score them with the data set's own scorer.

    Returns the mean reward and the median, 95th percentile and maximum of the response length in tokens.
    """
    data = reasoning_gym.create_dataset("gcd", seed=WARM_UP_SEED - MEASURED, size=MEASURED, **TASK)
    items = list(data)
    inputs = tokenizer(
        [item["question"] for item in items], return_tensors="pt", padding=True, padding_side="left"
    )
    model.eval()
    generate: Any = model.generate  # pyright: ignore[reportAttributeAccessIssue]
    output = generate(
        **inputs, do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=MAX_NEW_TOKENS
    )
    eos = token_id(tokenizer, "eos")
    rewards, lengths = [], []
    for row, item in zip(output[:, inputs["input_ids"].shape[1] :].tolist(), items, strict=True):
        tokens = row[: row.index(eos) + 1] if eos in row else row
        lengths.append(len(tokens))
        text = str(tokenizer.decode(tokens, skip_special_tokens=True))
        rewards.append(data.score_answer(extract_answer(text), item))
    lengths.sort()
    return {
        "reward": sum(rewards) / MEASURED,
        "median_tokens": lengths[MEASURED // 2],
        "p95_tokens": lengths[int(0.95 * MEASURED)],
        "max_tokens": lengths[-1],
    }


# ---------------------------------------------------------------------------------------------
# Command


def settings_of(steps: int, seed: int) -> dict[str, Any]:
    """Everything that determines the model; a folder with equal settings is not made again."""
    return {
        "steps": steps,
        "seed": seed,
        "recipe": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),  # this file: all the rest
    }


def is_made(out: Path, settings: dict[str, Any]) -> bool:
    """Whether ``out`` holds a complete model made with ``settings``."""
    try:
        made = json.loads((out / SETTINGS_FILE).read_text())["settings"]
    except (OSError, ValueError, KeyError):
        return False
    files = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    return made == settings and all((out / name).is_file() for name in files)


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of the model."
)
@click.option("--steps", type=click.IntRange(min=1), default=900, show_default=True, help="Warm-up steps.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of weights and texts.")
@click.option(
    "--threads", type=click.IntRange(min=1), default=None, help="CPU threads  [default: all, at most 4]"
)
@click.option("--force", is_flag=True, help="Make it again even if the folder is complete.")
def main(out: Path, steps: int, seed: int, threads: int | None, force: bool) -> None:
    """Make the model unless it exists; see the module's docstring."""
    console = Console()
    settings = settings_of(steps, seed)
    if is_made(out, settings) and not force:
        console.print(f"{out}: already made with these settings (--force makes it again)")
        return
    if out.exists() and any(out.iterdir()) and not (out / SETTINGS_FILE).exists():
        raise click.ClickException(f"{out} holds other files; name an empty or a new folder with --out")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads or min(4, cores))
    torch.manual_seed(seed)
    started = time.monotonic()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TextColumn("{task.fields[loss]}"), TimeRemainingColumn(), console=console) as bar:
        loss = warm_up(model, tokenizer, steps, seed, bar)
    with console.status("sampling a few responses"):
        measured = measure(model, tokenizer)

    # Written next to it and renamed, so that a killed run leaves no incomplete folder under the final name.
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    seconds = time.monotonic() - started
    record = {"settings": settings, "loss": loss, "measured": measured, "seconds": round(seconds, 1)}
    (part / SETTINGS_FILE).write_text(json.dumps(record, indent=2) + "\n")
    if out.exists():
        shutil.rmtree(out)
    part.rename(out)
    count = sum(p.numel() for p in model.parameters())
    console.print(
        f"{out}: {count / 1e6:.2f} M parameters in {seconds:.0f} s; at temperature 1 mean reward "
        f"{measured['reward']:.2f}, response tokens median {measured['median_tokens']}, "
        f"p95 {measured['p95_tokens']}, max {measured['max_tokens']}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
