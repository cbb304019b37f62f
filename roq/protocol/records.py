"""The record of a group, as lua/lib/groups.lua keeps it."""

from __future__ import annotations

import msgspec

__all__ = ["GroupRecord", "MemberRecord"]


class GroupRecord(msgspec.Struct):
    """A group's record as the library keeps it (lua/lib/groups.lua)."""

    group: int
    ordinal: int
    v: int
    members: list[MemberRecord]
    since: int = 0
    judgement: MemberRecord | None = None


class MemberRecord(msgspec.Struct):
    state: str
    worker: str = ""
    v: int = 0
    reward: float = 0.0
    tokens: int = 0
    advantage: float | None = None
