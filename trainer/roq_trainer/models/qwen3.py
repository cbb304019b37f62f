"""Qwen3, dense: every query and key head is normalised before the rotary embedding."""

from __future__ import annotations

from typing import Any

from roq_trainer.models import blocks
from roq_trainer.models.architecture import Architecture, ModelShape, Row


def _layer(s: ModelShape) -> tuple[Row, ...]:
    return (
        *blocks.attention(s),
        Row("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), (s.head_dim,)),
        Row("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), (s.head_dim,)),
        *blocks.gated_mlp(s),
    )


def _transformer(s: ModelShape) -> dict[str, Any]:
    return blocks.transformer(s) | {"qk_layernorm": True}


ARCHITECTURE = Architecture(
    name="Qwen3ForCausalLM",
    defaults={
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_parameters.rope_theta": 10000.0,
    },
    accepted={
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "use_sliding_window": (False,),
        "layer_types": ("full_attention",),
        "rope_parameters.rope_type": ("default",),
    },
    layer=_layer,
    transformer=_transformer,
    gpt=blocks.rope,
)
