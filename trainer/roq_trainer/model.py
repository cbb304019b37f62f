"""Build a Megatron model from ``config.json`` of a Hugging Face folder.

Everything specific to an architecture is in :mod:`roq_trainer.models`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE, get_gpt_decoder_block_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from roq.config import Training
from roq.errors import ConfigError
from roq_trainer.cpu import HAVE_CUDA
from roq_trainer.models import ModelShape, architectures

__all__ = ["DTYPES", "build_model", "build_optimizer", "check_parallel", "read_shape"]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read_shape(folder: Path) -> ModelShape:
    """Read and check ``config.json``.

    Raises:
        ConfigError: the architecture, or a variant of it, is not supported.
    """
    where = folder / "config.json"
    try:
        file: dict[str, Any] = json.loads(where.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from None
    name = (file.get("architectures") or ["(none)"])[0]
    architecture = architectures().get(name)
    if architecture is None:
        raise ConfigError(
            f"{where}: architecture {name} is not supported; use one of {', '.join(architectures())}"
        )
    config = {**architecture.defaults, **_with_flat_rope(file)}
    for key, accepted in architecture.accepted.items():
        value = config.get(key, accepted[0])
        if any(item not in accepted for item in (value if isinstance(value, list) else [value])):
            supported = " or ".join(map(repr, accepted))
            raise ConfigError(
                f"{where}: {key} = {value!r} is not supported by the trainer; it supports {supported}"
            )
    try:
        heads = int(config["num_attention_heads"])
        return ModelShape(
            architecture=architecture,
            config=config,
            layers=int(config["num_hidden_layers"]),
            hidden=int(config["hidden_size"]),
            ffn=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            tied=bool(config.get("tie_word_embeddings", False)),
            max_positions=int(config["max_position_embeddings"]),
        )
    except KeyError as error:
        raise ConfigError(f"{where}: {error.args[0]} is missing") from None


def _with_flat_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the RoPE settings of transformers 4 and 5 under the same keys."""
    config = dict(config)
    rope = {"rope_type": "default"}
    if "rope_theta" in config:
        rope["rope_theta"] = config.pop("rope_theta")
    for key in ("rope_scaling", "rope_parameters"):
        rope |= config.pop(key, None) or {}
    rope["rope_type"] = rope.pop("type", rope["rope_type"])
    return config | {f"rope_parameters.{key}": value for key, value in rope.items()}


def check_parallel(shape: ModelShape, tensor: int, pipeline: int) -> None:
    """Check that the model can be split.

    Raises:
        ConfigError: a size is not divisible by the number of parts.
    """
    for what, size in (
        ("vocabulary", shape.vocab),
        ("number of attention heads", shape.heads),
        ("number of key/value heads", shape.kv_heads),
        ("MLP width", shape.ffn),
    ):
        if size % tensor:
            raise ConfigError(f"the model's {what}, {size}, is not divisible by tensor_parallel = {tensor}")
    if shape.layers % pipeline:
        raise ConfigError(
            f"the model's {shape.layers} layers are not divisible by pipeline_parallel = {pipeline}"
        )


def transformer_config(
    shape: ModelShape, tensor: int, pipeline: int, dtype: torch.dtype
) -> TransformerConfig:
    """Megatron's description of the model, with every fusion that needs CUDA extensions off."""
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        **shape.architecture.transformer(shape),
        hidden_dropout=0.0,  # log-probs must be deterministic
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        variable_seq_lengths=True,  # every micro batch is padded to its own longest sequence
        # There are no experts, but variable lengths require this.
        moe_token_dispatcher_type="alltoall",  # noqa: S106
        calculate_per_token_loss=True,  # gradients are divided by the batch's token count, over all DP ranks
        use_cpu_initialization=not HAVE_CUDA,
        # The weights come from files, but initialization marks parameters as split: without the marks the
        # gradient norm, and so the clipping, is wrong under tensor parallelism.
        perform_initialization=True,
    )


def build_model(
    shape: ModelShape, dtype: torch.dtype, tensor: int = 1, pipeline: int = 1
) -> DistributedDataParallel:
    """This rank's part of the model in Megatron's data-parallel wrapper, without the run's weights.

    Needs ``parallel_state`` initialised and :func:`roq_trainer.cpu.megatron_device`.

    Raises:
        ConfigError: the model cannot be split like this, or the data type needs a GPU.
    """
    check_parallel(shape, tensor, pipeline)
    if dtype is not torch.float32 and not HAVE_CUDA:
        raise ConfigError("model.dtype must be float32 where there is no GPU")
    config = transformer_config(shape, tensor, pipeline, dtype)
    # Not yet run on a GPU with Transformer Engine.
    spec = get_gpt_decoder_block_spec(config, HAVE_CUDA and HAVE_TE, normalization=config.normalization)
    model: torch.nn.Module = GPTModel(
        config=config,
        transformer_layer_spec=spec,  # type: ignore[arg-type]  # annotated too narrowly
        vocab_size=shape.vocab,
        max_sequence_length=shape.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=shape.tied,
        **shape.architecture.gpt(shape),
    )
    if HAVE_CUDA:
        model.cuda(torch.cuda.current_device())
    if config.bf16:
        model = Float16Module(config, model)
    wrapped = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=_distributed_optimizer()
        ),
        module=model,
    )
    # Without this the gradients of norms are wrong under TP, and ranks diverge silently.
    config.finalize_model_grads_func = finalize_model_grads
    return wrapped


def build_optimizer(
    model: DistributedDataParallel, training: Training, dtype: torch.dtype
) -> MegatronOptimizer:
    """AdamW with a constant learning rate. Build it after loading the weights: it may copy them."""
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=training.lr,
            min_lr=training.lr,
            weight_decay=training.weight_decay,
            adam_beta1=training.adam_beta1,
            adam_beta2=training.adam_beta2,
            # Infinity never clips, but the norm is still computed and reported.
            clip_grad=training.grad_clip or float("inf"),
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=_distributed_optimizer(),
        ),
        [model],
    )


def _distributed_optimizer() -> bool:
    """True if DP ranks share the optimizer's state; its checkpoints cannot be loaded without CUDA."""
    return HAVE_CUDA and parallel_state.get_data_parallel_world_size() > 1
