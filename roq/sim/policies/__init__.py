"""The policies: they decide which prompts are generated when, and which groups are trained.

One file each. A new one is a module here whose ``POLICY`` is a subclass of :class:`Policy` (or of
:class:`~roq.sim.queue.QueuePolicy`), and a test.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil

from roq.errors import ConfigError
from roq.sim.world import Policy

__all__ = ["Policy", "load_policy", "policy_names"]

_ORDER = ("roq", "nemo-in-order", "nemo-weight-fifo", "verl-drop", "trl", "roll", "roll-evict")


def policy_names() -> list[str]:
    """All policies: the article's in its order, then any others."""
    found = {m.name.replace("_", "-") for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_")}
    return [name for name in _ORDER if name in found] + sorted(found - set(_ORDER))


def load_policy(name: str) -> type[Policy]:
    """The policy of this name.

    Raises:
        ConfigError: there is none.
    """
    names = policy_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(names)}"
        raise ConfigError(f"no policy {name!r}{hint}")
    return importlib.import_module(f"roq.sim.policies.{name.replace('-', '_')}").POLICY
