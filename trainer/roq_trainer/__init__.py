"""The training process of roq: GRPO on Megatron, fed only through Redis.

Run it with ``python -m roq_trainer --redis URL --run NAME``, or one process per GPU with torchrun.
"""

import warnings

# Megatron says at import that Apex and Transformer Engine are missing and which torch names it still
# uses. Neither is for our users to act on; everything else stays visible.
warnings.filterwarnings("ignore", module=r"megatron\.core(\..*)?")
warnings.filterwarnings(
    "ignore", message="Please use DTensor instead", category=FutureWarning
)  # its checkpoints
