"""The record of a group, as stored by lua/lib/groups.lua."""

from __future__ import annotations

import msgspec

__all__ = ["GroupRecord", "MemberRecord"]


class GroupRecord(msgspec.Struct):
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
