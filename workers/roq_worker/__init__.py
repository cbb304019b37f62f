"""The rollout worker of roq: vLLM generates, a process apart scores, Redis coordinates.

Start reading at :mod:`roq_worker.rollout`. Importing this package imports neither torch nor vLLM.
"""
