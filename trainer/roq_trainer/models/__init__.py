"""The architectures that can be trained, one module each.

Adding an architecture:

1. Copy ``qwen3.py`` to a module of this folder and describe the architecture in its ``ARCHITECTURE``. It is
   found by its name in ``architectures`` of ``config.json``; no registration is needed.
2. Read transformers' ``configuration_*.py`` and ``modeling_*.py``. Every key of ``config.json`` that changes
   the computation must be read, or listed in ``accepted`` with the values that this trainer supports.
   List transformers' defaults for missing keys in ``defaults``, except what ``read_shape`` in ``model.py``
   assumes for all: None for ``num_key_value_heads`` and ``head_dim``, False for ``tie_word_embeddings``.
3. List every tensor of a layer once in ``layer``. ``blocks.py`` has the parts that most dense models share.
   The embedding, the final norm and the output layer are not listed: ``layout`` in ``weights.py`` adds them.
4. Give Megatron's options in ``transformer`` (for ``TransformerConfig``) and ``gpt`` (for ``GPTModel``).
5. Add the ``model_type`` to ``MODEL_TYPES`` in ``tests/trainer/trainer_support.py``. The tests then compare
   logits, gradients and exported weights with transformers'. ``test_architectures.py`` is fast: it checks
   the rows and the defaults. ``test_megatron.py`` takes minutes: it computes at every split over ranks.
6. Name it in ``trainer/README.md``.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from roq_trainer.models.architecture import Architecture, ModelShape, Row

__all__ = ["Architecture", "ModelShape", "Row", "architectures"]


@cache
def architectures() -> dict[str, Architecture]:
    """All architectures of this folder, by their names in ``config.json``."""
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    found = [module.ARCHITECTURE for module in modules if hasattr(module, "ARCHITECTURE")]
    return {architecture.name: architecture for architecture in found}
