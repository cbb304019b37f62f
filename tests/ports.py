"""Ports for servers that cannot choose one themselves."""

from __future__ import annotations

import random
import socket


def free_ports(count: int) -> list[int]:
    """Free ports whose cluster bus ports (10,000 above) are free too.

    All are below the range from which the kernel takes ports of outgoing connections. They are drawn at
    random, so that two test processes do not choose the same.
    """
    found: list[int] = []
    for port in random.sample(range(11_000, 22_000), 11_000):
        if _is_free(port) and _is_free(port + 10_000):
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"no {count} free ports")


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
