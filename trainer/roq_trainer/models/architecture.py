"""The declaration of an architecture, and the sizes of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["Architecture", "ModelShape", "Row"]


@dataclass(frozen=True)
class Row:
    """One parameter of Megatron's model and the Hugging Face tensors that it is packed from.

    In :attr:`Architecture.layer` both names are relative to the layer.

    Attributes:
        name: Megatron's name, as in its local (not Transformer Engine) layers.
        hf: Hugging Face's names, in the order in which they are packed.
        size: shape of the packed tensor before tensor parallelism splits it.
        split: the dimension that tensor parallelism splits; None if every rank holds all of it.
        packing: "qkv" interleaves query, key and value heads by key/value group; "gate_up" is the gate
            followed by the up projection, each of which is split; None for a single tensor.
    """

    name: str
    hf: tuple[str, ...]
    size: tuple[int, ...]
    split: Literal[0, 1] | None = None
    packing: Literal["qkv", "gate_up"] | None = None


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model, from its ``config.json``.

    Attributes:
        architecture: the kind of model.
        config: all of ``config.json`` and the architecture's defaults, for settings of only some models. The
            RoPE settings of old and new files have keys such as ``rope_parameters.rope_theta``.
        layers, hidden, ffn, vocab: depth, width, width of the MLP, rows of the embedding.
        heads, kv_heads, head_dim: query heads, key/value heads (groups), channels of one head.
        tied: the output layer shares the embedding's weights.
        max_positions: longest supported sequence, in tokens.
    """

    architecture: Architecture
    config: Mapping[str, Any]
    layers: int
    hidden: int
    ffn: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool
    max_positions: int

    @property
    def qkv(self) -> int:
        """Rows of the query, key and value projections together."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim


@dataclass(frozen=True)
class Architecture:
    """One kind of model.

    Attributes:
        name: as in ``architectures`` of ``config.json``.
        defaults: transformers' defaults for keys missing from ``config.json``.
        accepted: the supported values of each key that the trainer supports only partly; every item of a
            list must be among them. A key that is in neither the file nor ``defaults`` passes.
        layer: the rows of one decoder layer.
        transformer, gpt: arguments of Megatron's ``TransformerConfig`` and ``GPTModel``.
    """

    name: str
    defaults: Mapping[str, Any]
    accepted: Mapping[str, tuple[Any, ...]]
    layer: Callable[[ModelShape], tuple[Row, ...]]
    transformer: Callable[[ModelShape], dict[str, Any]]
    gpt: Callable[[ModelShape], dict[str, Any]]
