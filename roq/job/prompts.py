"""The run's prompts: read from a file or made by reasoning-gym, in an order every worker can compute.

No process hands out prompts. The scheduler issues ordinals 0, 1, 2, …; every worker loads the same
rows, checks their digest against the run's, and looks up ``prompts.item(ordinal, seed)``. Ordinal
``o`` belongs to epoch ``o // len``, and each epoch has its own shuffle made from (seed, epoch) alone.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import json
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from roq.config import Data
from roq.errors import ConfigError

__all__ = ["Prompts", "load_prompts"]

Item = dict[str, Any]

DEEPEST = 64  # rows are written as JSON on their way to a user's function, from any depth of calls
_TOO_DEEP = f"nested more than {DEEPEST} deep; flatten it"


class Prompts:
    """The rows of a data set and the order in which ordinals walk through them.

    Each item holds at least ``prompt`` (the text after the template), ``question`` (the text before
    it) and ``answer``, and beside them every column of its row, or for a reasoning-gym entry its
    ``metadata``, and the ``dataset``, ``settings`` and ``row`` it was made with, for the scorer.

    Attributes:
        digest: sha256 (hex) over the content and order of all rows; equal digests mean equal data.
        shuffle: whether every epoch has its own order; False repeats the rows as they are.
    """

    def __init__(self, items: Sequence[Item], shuffle: bool = True) -> None:
        self._items = list(items)
        self.shuffle = shuffle
        self.digest = _digest(self._items)
        self._orders: dict[tuple[int, int], array[int]] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def index(self, ordinal: int, seed: int) -> int:
        """The row (from 0) that ``ordinal`` (from 0) stands for in a run with this ``seed``."""
        epoch, place = divmod(ordinal, len(self._items))
        return self._order(seed, epoch)[place] if self.shuffle else place

    def item(self, ordinal: int, seed: int) -> Item:
        """The row itself; a shallow copy, so that a caller may add keys."""
        return dict(self._items[self.index(ordinal, seed)])

    def _order(self, seed: int, epoch: int) -> array[int]:
        key = (seed, epoch)
        if key not in self._orders:
            # Sorting by a hash is a shuffle that no Python version or library can change;
            # random.shuffle promises nothing of the kind.
            while len(self._orders) >= 2:  # work in flight spans two epochs at most
                self._orders.pop(next(iter(self._orders)))
            rank = [
                hashlib.blake2b(f"{seed}:{epoch}:{row}".encode(), digest_size=8).digest()
                for row in range(len(self._items))
            ]
            self._orders[key] = array("q", sorted(range(len(rank)), key=lambda row: (rank[row], row)))
        return self._orders[key]


def load_prompts(data: Data) -> Prompts:
    """Read the rows that ``[data]`` names.

    Raises:
        ConfigError: the file cannot be read, a line of it is broken (the message has its number), a
            field is missing, or reasoning-gym has no such data set or setting.
    """
    rows = _from_file(data, Path(data.file)) if data.file is not None else _from_reasoning_gym(data)
    if not rows:
        raise ConfigError(f"{data.file or data.dataset}: there are no prompts in it; give at least one row")
    return Prompts(rows, data.shuffle)


# ---- files ---------------------------------------------------------------------------------------


def _from_file(data: Data, path: Path) -> list[Item]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; set data.file to a .jsonl or .parquet file")
    if path.suffix == ".parquet":
        rows = _parquet(path, (data.prompt_field, data.answer_field))
    elif path.suffix in (".jsonl", ".ndjson", ".json"):
        rows = _jsonl(path)
    else:
        raise ConfigError(
            f"{path}: data.file must end in .jsonl or .parquet, not {path.suffix or 'nothing'!r}"
        )
    items: list[Item] = []
    for where, row in rows:
        if _deeper(row, DEEPEST):
            raise ConfigError(f"{where}: {_TOO_DEEP}")
        for setting, field in (("prompt_field", data.prompt_field), ("answer_field", data.answer_field)):
            if row.get(field) is None:
                raise ConfigError(
                    f"{where}: {_missing(field, row)}; set data.{setting} to the field that holds it"
                )
        question, answer = row[data.prompt_field], row[data.answer_field]
        if not isinstance(question, str) or not question:
            raise ConfigError(f"{where}: field {data.prompt_field!r} must be text, not {question!r}")
        items.append(row | {"question": question, "prompt": _fill(data.template, question), "answer": answer})
    return items


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than ``levels`` deep."""
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if not isinstance(value, list):
        return False
    return levels == 0 or any(_deeper(one, levels - 1) for one in cast("list[Any]", value))


def _missing(field: str, row: Item) -> str:
    if field in row:
        return f"field {field!r} is null"
    near = difflib.get_close_matches(field, row, n=1, cutoff=0.4)
    return f"field {field!r} is missing (it has {', '.join(map(repr, near or row)) or 'no fields'})"


def _jsonl(path: Path) -> Iterator[tuple[str, Item]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"{path}, line {number}: not valid JSON: {error}") from None
                except RecursionError:
                    raise ConfigError(f"{path}, line {number}: {_TOO_DEEP}") from None
                if not isinstance(row, dict):
                    raise ConfigError(
                        f"{path}, line {number}: must be a JSON object, not {type(row).__name__}"
                    )
                yield f"{path}, line {number}", row
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None


def _parquet(path: Path, fields: tuple[str, str]) -> Iterator[tuple[str, Item]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError(
            f"{path}: reading parquet needs pyarrow; pip install pyarrow, or give JSONL"
        ) from None
    try:
        file = parquet.ParquetFile(path)
        columns: list[str] = file.schema_arrow.names
    except Exception as error:  # noqa: BLE001 - pyarrow's errors share no base class
        raise ConfigError(f"{path}: not a readable parquet file: {error}") from None
    for field in fields:
        if field not in columns:
            missing = _missing(field, dict.fromkeys(columns))
            raise ConfigError(f"{path}: {missing}; set data.prompt_field or data.answer_field")
    number = 0
    for batch in file.iter_batches():
        for row in batch.to_pylist():
            number += 1
            yield f"{path}, row {number}", row


# ---- reasoning-gym -------------------------------------------------------------------------------


def _from_reasoning_gym(data: Data) -> list[Item]:
    name = data.dataset
    assert name is not None  # Data allows no other case
    try:
        factory = importlib.import_module("reasoning_gym.factory")
        importlib.import_module("reasoning_gym")  # registers the data sets
    except ImportError:
        raise ConfigError(f"data.dataset = {name!r} needs reasoning-gym; pip install reasoning-gym") from None
    if name not in factory.DATASETS:
        near: list[str] = difflib.get_close_matches(name, list(factory.DATASETS), n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(sorted(factory.DATASETS))}"
        raise ConfigError(f"data.dataset = {name!r} is not a reasoning-gym data set; {hint}")
    try:
        entries = factory.create_dataset(name, size=data.size, seed=data.seed, **data.settings)
        # By index: some data sets' iterators stop early or share state.
        rows = [entries[row] for row in range(data.size)]
    except Exception as error:  # noqa: BLE001 - its checks raise AssertionError, TypeError, ValueError
        raise ConfigError(f"data.settings do not suit the data set {name!r}: {error}") from None
    return [
        {
            "question": row["question"],
            "prompt": _fill(data.template, row["question"]),
            "answer": row["answer"],
            "metadata": row["metadata"],
            "dataset": name,
            "settings": data.settings | {"size": data.size, "seed": data.seed},
            "row": number,
        }
        for number, row in enumerate(rows)
    ]


# ---- both ----------------------------------------------------------------------------------------


def _fill(template: str, question: str) -> str:
    # Not str.format: questions and templates about code or sets are full of braces.
    return template.replace("{prompt}", question)


def _digest(items: Sequence[Item]) -> str:
    sha = hashlib.sha256()
    for item in items:
        # A reasoning-gym entry's metadata may hold objects without a stable text form; it follows
        # from the data set and its settings, and prompt and answer show a differing library version.
        content = {key: value for key, value in item.items() if key != "metadata"}
        line = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
        sha.update(line.encode("utf-8", "surrogatepass") + b"\n")
    return sha.hexdigest()
