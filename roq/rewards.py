"""Reward functions, and loading the one that a configuration names.

A reward function takes the data row (a dict, see :mod:`roq.job.prompts`) and the response text, and
returns a float. It runs in a separate process; raising there fails the attempt and is never
trained as a reward of 0. So return 0.0 for a wrong answer, and raise if scoring is impossible.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from roq.errors import ConfigError

__all__ = ["RewardFunction", "exact_match", "load_function", "reasoning_gym"]

RewardFunction = Callable[[dict[str, Any], str], float]

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def exact_match(item: dict[str, Any], response: str) -> float:
    """1.0 if the response is the answer, else 0.0.

    Only the text in the last ``<answer>…</answer>`` of the response counts, or all of it if there is none;
    surrounding white space is ignored.

    >>> exact_match({"answer": 42}, "6 * 7 is <answer> 42 </answer>")
    1.0
    """
    return float(_final(response) == str(item["answer"]).strip())


def reasoning_gym(item: dict[str, Any], response: str) -> float:
    """The score from the data set's ``score_answer``, usually between 0 and 1.

    The answer is extracted as in :func:`exact_match`.

    Raises:
        ConfigError: the row does not come from reasoning-gym.
    """
    if "dataset" not in item or "row" not in item:
        raise ConfigError(
            "roq.rewards:reasoning_gym scores rows of a reasoning-gym data set only; "
            "for rows from a file use roq.rewards:exact_match or your own function"
        )
    # The entry is generated again, not taken from the row: a scorer may need parts that JSON cannot hold.
    settings = json.dumps(item["settings"], sort_keys=True)
    dataset = _dataset(item["dataset"], settings)
    return float(dataset.score_answer(_final(response), _entry(item["dataset"], settings, item["row"])))


def _final(response: str) -> str:
    found = _ANSWER.findall(response)
    return (found[-1] if found else response).strip()


@functools.lru_cache(maxsize=16)
def _dataset(name: str, settings: str) -> Any:
    # With the run's settings: some scorers depend on them (such as the number of decimals).
    factory = importlib.import_module("reasoning_gym").factory
    return factory.create_dataset(name, **json.loads(settings))


@functools.lru_cache(maxsize=256)  # a group's responses come close together
def _entry(name: str, settings: str, row: int) -> dict[str, Any]:
    return _dataset(name, settings)[row]


def load_function(name: str, setting: str = "reward.function") -> Callable[..., Any]:
    """The function that ``module:function`` names; modules in the current directory can be imported too.

    Args:
        name: ``module:function``.
        setting: the setting that contains the name, for messages.

    Raises:
        ConfigError: the module cannot be imported, or has no such function.
    """
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute:
        raise ConfigError(f"{setting} = {name!r} must look like module:function")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may fail with anything while it is imported
        raise ConfigError(
            f"{setting} = {name!r}: module {module_name!r} cannot be imported "
            f"({type(error).__name__}: {error}); it must be importable where the worker runs"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ConfigError(f"{setting} = {name!r}: module {module_name!r} has no function {attribute!r}")
    return cast("Callable[..., Any]", function)
