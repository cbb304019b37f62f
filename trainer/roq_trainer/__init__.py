"""The training process of roq: GRPO on Megatron, with data from Redis only.

Run it with ``python -m roq_trainer --redis URL --run NAME``, or one process per GPU with torchrun.
"""

import warnings

# On import Megatron warns that Apex and Transformer Engine are missing, and about deprecated torch names.
# Users cannot act on either.
warnings.filterwarnings("ignore", module=r"megatron\.core(\..*)?")
warnings.filterwarnings(
    "ignore", message="Please use DTensor instead", category=FutureWarning
)  # its checkpoints
