"""The rollout worker of roq: vLLM generates, separate processes score, Redis coordinates.

Start with :mod:`roq_worker.rollout`. Importing this package imports neither torch nor vLLM.
"""
