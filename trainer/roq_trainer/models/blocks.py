"""Parts of most dense decoder-only models: RMSNorm, attention, gated SiLU MLP, rotary positions."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F

from roq_trainer.models.architecture import ModelShape, Row

__all__ = ["attention", "gated_mlp", "rope", "transformer"]


def attention(s: ModelShape) -> tuple[Row, ...]:
    """Norm, query/key/value projection and output projection, without biases."""
    qkv = tuple(f"self_attn.{part}_proj.weight" for part in "qkv")
    return (
        Row("input_layernorm.weight", ("input_layernorm.weight",), (s.hidden,)),
        Row("self_attention.linear_qkv.weight", qkv, (s.qkv, s.hidden), 0, "qkv"),
        Row(
            "self_attention.linear_proj.weight",
            ("self_attn.o_proj.weight",),
            (s.hidden, s.heads * s.head_dim),
            1,
        ),
    )


def gated_mlp(s: ModelShape) -> tuple[Row, ...]:
    """Norm, gate and up projection, down projection, without biases."""
    gate_up = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    return (
        Row("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), (s.hidden,)),
        Row("mlp.linear_fc1.weight", gate_up, (2 * s.ffn, s.hidden), 0, "gate_up"),
        Row("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), (s.hidden, s.ffn), 1),
    )


def transformer(s: ModelShape) -> dict[str, Any]:
    """``TransformerConfig``: RMSNorm and a gated SiLU MLP."""
    return {
        "normalization": "RMSNorm",
        "layernorm_epsilon": float(s.config["rms_norm_eps"]),
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
    }


def rope(s: ModelShape) -> dict[str, Any]:
    """``GPTModel``: rotary position embeddings without scaling."""
    return {"position_embedding_type": "rope", "rotary_base": float(s.config["rope_parameters.rope_theta"])}
