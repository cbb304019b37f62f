"""The simulator: predicts runs without using GPUs (docs/simulator.md).

Discrete events in virtual time. roq's own policy drives the real library on a real server; the policies of
other frameworks follow their published rules, one file each in :mod:`roq.sim.policies`.
Needs the extra ``sim``: ``pip install '.[sim]'``.
"""
