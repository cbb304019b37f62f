"""Processes that end with the one that started them, even when it is killed with -9."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

from roq.processes import start_mark

__all__ = ["die_with_parent", "end_with", "watch_parent"]

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to kill this process with its parent's starting thread; elsewhere :func:`watch_parent`.

    Works even while this process holds the GIL. Only for children that the main thread starts: the
    signal comes when that thread ends.
    """
    parent = os.getppid()
    if not sys.platform.startswith("linux"):
        watch_parent()
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)


def watch_parent(every_s: float = 1.0) -> None:
    """End this process soon after its parent is gone, whichever thread of it started us."""
    parent = os.getppid()
    _end_unless(lambda: os.getppid() == parent, every_s)


def end_with(pid: int, mark: str, every_s: float = 1.0) -> None:
    """End this process soon after another one, not its parent, is gone.

    Args:
        pid, mark: the process, and when it started (:func:`roq.processes.start_mark`).
    """
    _end_unless(lambda: start_mark(pid) == mark, every_s)


def _end_unless(alive: Callable[[], bool], every_s: float) -> None:
    def watch() -> None:
        while alive():
            time.sleep(every_s)
        os._exit(1)

    threading.Thread(target=watch, name="end-with", daemon=True).start()
