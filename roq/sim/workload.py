"""Workloads: prompt and response lengths by group, in the order of admission."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from roq.errors import ConfigError
from roq.events.archive import read_archive
from roq.sim.events import RealRun

__all__ = ["Lengths", "Lognormal", "Workload", "load_trace", "workload_of_run"]

Tokens = Annotated[int, Meta(ge=1)]


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One group: tokens of its prompt, and of each candidate's response."""

    prompt: Tokens
    responses: Annotated[tuple[Tokens, ...], Meta(min_length=1)]


class Workload(msgspec.Struct, frozen=True):
    """Groups in order of admission; after the last one the first comes again.

    ``assumed`` describes its source, for readers of the results.
    """

    groups: Sequence[Lengths]
    assumed: str

    def __getitem__(self, ordinal: int) -> Lengths:
        """The group at this place of the (endless) order."""
        return self.groups[ordinal % len(self.groups)]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and response together."""
        return max(group.prompt + max(group.responses) for group in self.groups)

    @property
    def response_mean(self) -> float:
        """Mean tokens of a response."""
        lengths = [length for group in self.groups for length in group.responses]
        return sum(lengths) / len(lengths)

    @property
    def tokens_mean(self) -> float:
        """Mean tokens of a response and its prompt."""
        prompts = [group.prompt for group in self.groups for _ in group.responses]
        return self.response_mean + sum(prompts) / len(prompts)

    @property
    def context_mean(self) -> float:
        """Mean context of a running request: its prompt, and half the length-biased mean response.

        A request is seen in proportion to how long it runs (renewal theory's inspection paradox).
        """
        weight = sum(length for group in self.groups for length in group.responses)
        seen = sum(
            length * (group.prompt + length / 2) for group in self.groups for length in group.responses
        )
        return seen / weight


class Lognormal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Lognormal lengths with a factor for each prompt.

    The log of a response's length is ``log(median) + sigma * (sqrt(c) * p + sqrt(1 - c) * r)`` with ``p``
    drawn for the prompt and ``r`` for the response, both standard normal; ``c = correlation``. The defaults
    are assumptions in the likeness of dapo-math-17k with Qwen3-8B; the trace of the article is not public.
    """

    groups: Annotated[int, Meta(ge=1)] = 1024
    median: Annotated[float, Meta(ge=1)] = 6060.0
    sigma: Annotated[float, Meta(ge=0, le=5)] = 0.76
    correlation: Annotated[float, Meta(ge=0, le=1)] = 0.58
    cap: Tokens = 38912
    prompt_median: Annotated[float, Meta(ge=1)] = 130.0
    prompt_sigma: Annotated[float, Meta(ge=0, le=5)] = 0.6
    prompt_cap: Tokens = 1024

    def draw(self, seed: int, size: int) -> Workload:
        """A workload of ``groups`` groups of ``size`` responses; the same for the same seed."""
        rng = np.random.default_rng(seed)
        # one group after the other, so that more candidates or more groups leave the first ones as they are
        groups: list[Lengths] = []
        for numbers in rng.spawn(self.groups):
            prompt_z, length_z = numbers.standard_normal(2)
            own_z = numbers.standard_normal(size)
            z = self.correlation**0.5 * length_z + (1 - self.correlation) ** 0.5 * own_z
            lengths = np.clip(np.rint(self.median * np.exp(self.sigma * z)), 1, self.cap)
            prompt = round(self.prompt_median * np.exp(self.prompt_sigma * prompt_z))
            groups.append(
                Lengths(min(self.prompt_cap, max(1, prompt)), tuple(int(length) for length in lengths))
            )
        assumed = (
            f"lognormal: median {self.median:,.0f}, sigma {self.sigma:g}, correlation {self.correlation:g} "
            f"within a prompt, at most {self.cap:,}; prompts: median {self.prompt_median:,.0f}, "
            f"sigma {self.prompt_sigma:g}, at most {self.prompt_cap:,}; {self.groups:,} groups"
        )
        return Workload(groups, assumed)


def load_trace(path: str | Path, size: int) -> Workload:
    """A workload from a file: JSONL of ``{"prompt": 130, "responses": [812, 9041, …]}``, or a run's archive.

    Either may be compressed (``.gz``). ``size`` is how many responses of a group are needed.

    Raises:
        ConfigError: the file cannot be read, a line is not a group, or a group has too few responses.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        lines = (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
    except (OSError, EOFError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if lines and b'"event"' in lines[0]:
        return workload_of_run(RealRun.replay(read_archive(path)), size, path.name)
    groups: list[Lengths] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            group = msgspec.json.decode(line, type=Lengths)
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        if len(group.responses) < size:
            raise ConfigError(
                f"{path}, line {number}: a group of {len(group.responses)} responses; {size} are needed"
            )
        groups.append(group)
    if not groups:
        raise ConfigError(f"{path} has no groups")
    return Workload(groups, f"trace {path.name}: {len(groups):,} groups")


def workload_of_run(run: RealRun, size: int, name: str) -> Workload:
    """The lengths that a real run had, in its own order.

    A response that the run never finished is given the mean length of those around it; the prompts' lengths
    are known as means only.
    """
    if run.group_size < size:
        raise ConfigError(f"{name}: groups of {run.group_size} responses; {size} are needed")
    by_ordinal = run.lengths()
    known = [length for lengths in by_ordinal.values() for length in lengths]
    if not known:
        raise ConfigError(f"{name}: no response was finished in this event log")
    groups: list[Lengths] = []
    recent = sum(known) / len(known)
    for ordinal in range(max(by_ordinal) + 1):
        lengths = by_ordinal.get(ordinal, [])
        if lengths:
            recent = sum(lengths) / len(lengths)
        filled = [*lengths, *[max(1, round(recent))] * size][:size]
        groups.append(Lengths(max(1, round(run.prompt_mean)), tuple(filled)))
    return Workload(groups, f"event log {name}: {len(groups):,} groups")
