"""Objects that are renewed in a forked child, where no thread is left to release the locks that were held."""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["renew_in_children"]


class Renewable(Protocol):
    """An object with locks."""

    def after_fork(self) -> None:
        """Replace every lock, and what the parent still uses."""
        ...


_objects: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(item: Renewable) -> None:
    """Call ``item.after_fork`` in every child that is forked while the object exists."""
    _objects.add(item)


def _after_fork() -> None:
    for item in list(_objects):
        item.after_fork()


os.register_at_fork(after_in_child=_after_fork)
