"""The protocol as plain Python lists, straight from its description: slow, obvious, and independent of
the Lua. The state machine of ``test_machine.py`` holds the real library against it."""

from __future__ import annotations

from dataclasses import dataclass, field

from roq import RunConfig


@dataclass
class Member:
    state: str = "pending"  # pending, leased, complete, cancelled
    worker: str = ""
    token: int = 0
    v: int | None = None
    failures: int = 0
    prefix: bool = False
    reward: float = 0.0


@dataclass(eq=False)
class Group:
    number: int
    ordinal: int
    drops: int
    v: int
    members: list[Member] = field(default_factory=list)
    judgement: Member | None = None  # its post-processing, once all members are in

    def part(self, m: int) -> Member:
        """A member by its index from 0; -1 is the post-processing."""
        if m >= 0:
            return self.members[m]
        assert self.judgement is not None
        return self.judgement

    def leased(self, worker: str) -> list[int]:
        parts = [(m, self.part(m)) for m in range(-(self.judgement is not None), len(self.members))]
        return [m for m, part in parts if part.state == "leased" and worker in ("", part.worker)]

    def oldest(self) -> int:
        versions = [m.v for m in self.members if m.v is not None and m.state != "cancelled"]
        return min(versions) if versions else self.v


Cell = tuple[str, Group] | None


class Model:
    """The state of a run."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.version = 0
        self.frontier = 0
        self.buffers: dict[int, list[Cell]] = {}
        self.batches: dict[int, list[Group]] = {}
        self.freed_to = 0
        self.next_ordinal = 0
        self.next_group = 1
        self.next_token = 1
        self.pending: list[tuple[Group, int]] = []
        self.requeued: list[tuple[int, int]] = []
        self.trained = self.filtered = self.discarded = 0
        self.dead: list[int] = []
        self.draining: set[str] = set()
        self.paused = False
        self.ended = False

    # -- reading ------------------------------------------------------------------------------------

    def cells(self, buffer: int) -> list[Cell]:
        return self.buffers.setdefault(buffer, [None] * self.config.slots)

    def last(self, version: int) -> int:
        end = version + self.config.eta
        return end if self.config.total_steps is None else min(end, self.config.total_steps - 1)

    def window(self) -> range:
        return range(self.frontier, self.version + self.config.eta + 1)

    def ready(self, buffer: int) -> bool:
        return sum(1 for c in self.cells(buffer) if c and c[0] == "occupied") >= self.config.batch_size

    def empties(self, buffer: int) -> list[int]:
        return [i for i, c in enumerate(self.cells(buffer)) if c is None]

    def of(self, kind: str, buffer: int) -> list[tuple[int, Group]]:
        return [(i, c[1]) for i, c in enumerate(self.cells(buffer)) if c and c[0] == kind]

    def find(self, group: Group) -> tuple[str, int, int] | None:
        for buffer, cells in self.buffers.items():
            for i, cell in enumerate(cells):
                if cell and cell[1] is group:
                    return cell[0], buffer, i
        return None

    def live(self, kind: str) -> list[Group]:
        return [g for b in sorted(self.buffers) for _, g in self.of(kind, b)]

    def exhausted(self) -> bool:
        total = None
        if self.config.prompts is not None and self.config.epochs is not None:
            total = self.config.prompts * self.config.epochs
        return total is not None and self.next_ordinal >= total and not self.requeued

    def inflight(self) -> int:
        return sum(len(g.leased("")) for g in self.live("reserved"))

    # -- moving -------------------------------------------------------------------------------------

    def put(self, buffer: int, i: int, kind: str, group: Group) -> None:
        assert self.cells(buffer)[i] is None
        self.cells(buffer)[i] = (kind, group)

    def close_hole(self, buffer: int, hole: int) -> None:
        reserved = self.of("reserved", buffer)
        if reserved and reserved[0][0] < hole:
            i, group = reserved[0]
            self.cells(buffer)[i] = None
            self.put(buffer, hole, "reserved", group)

    def pull_forward(self) -> None:
        while True:
            move = next(
                (
                    (b, later)
                    for b in self.window()
                    if not self.ready(b) and self.empties(b)
                    for later in self.window()
                    if later > b and self.of("occupied", later)
                ),
                None,
            )
            if move is None:
                return
            to, source = move
            i, group = self.of("occupied", source)[-1]
            self.cells(source)[i] = None
            self.put(to, self.empties(to)[0], "occupied", group)

    # -- workers ------------------------------------------------------------------------------------

    def lease(self, group: Group, m: int, worker: str, version: int) -> tuple[int, int, int]:
        member = group.part(m)
        member.state, member.worker, member.token = "leased", worker, self.next_token
        if m >= 0:
            member.v = version if member.v is None else min(member.v, version)
        self.next_token += 1
        return group.number, m + 1, member.token

    def reserve(self, worker: str, version: int, limit: int) -> tuple[list[tuple[int, int, int]], str | None]:
        if self.ended:
            return [], "exhausted"
        if worker in self.draining:
            return [], "draining"
        room = limit
        if self.config.max_inflight is not None:
            room = min(room, max(0, self.config.max_inflight - self.inflight()))
        capped = room < limit
        given: list[tuple[int, int, int]] = []
        for group, _ in list(self.pending)[: room + 16]:
            found = self.find(group)
            assert found is not None
            if group.judgement is not None or found[1] <= version + self.config.eta:
                for m in range(-(group.judgement is not None), len(group.members)):
                    if group.part(m).state == "pending" and len(given) < room:
                        self.pending.remove((group, m))
                        given.append(self.lease(group, m, worker, version))
                group.v = group.oldest()
        refused: str | None = None
        while len(given) < room:
            refused = self.obstacle(version)
            place = None if refused else self.latest_empty(version)
            if place is None:
                refused = refused or "window_full"
                break
            if self.requeued:
                ordinal, drops = self.requeued.pop(0)
            else:
                ordinal, drops = self.next_ordinal, 0
                self.next_ordinal += 1
            group = Group(self.next_group, ordinal, drops, version)
            group.members = [Member() for _ in range(self.config.candidates)]
            self.next_group += 1
            self.put(*place, "reserved", group)
            for m in range(len(group.members)):
                if len(given) < room:
                    given.append(self.lease(group, m, worker, version))
                else:
                    self.pending.append((group, m))
        return given, refused or ("inflight_cap" if capped else None)

    def obstacle(self, version: int) -> str | None:
        if self.paused:
            return "paused"
        steps = self.config.total_steps
        if self.exhausted() or (steps is not None and self.frontier >= steps):
            return "exhausted"
        if version + self.config.eta < self.frontier:
            return "worker_stale"
        return None

    def latest_empty(self, version: int) -> tuple[int, int] | None:
        legal = range(self.frontier, self.last(version) + 1)
        if all(self.ready(b) for b in legal):
            return None
        for buffer in reversed(legal):
            if self.empties(buffer):
                return buffer, self.empties(buffer)[-1]
        return None

    def reopen(self, group: Group, m: int, *, failed: bool, keep: bool) -> str:
        member = group.part(m)
        member.prefix = member.prefix and keep
        if not member.prefix:
            member.v = None
        member.failures += failed
        member.state, member.worker = "pending", ""
        self.pending.append((group, m))
        if failed and member.failures >= self.config.max_attempts:
            self.retire(group)
            self.dead.append(group.ordinal)
            return "dead"
        return "pending"

    def expire(self, worker: str) -> None:
        for group, m in self.claims_of(worker):
            if m in group.leased(worker):  # it may have left with its group
                self.reopen(group, m, failed=True, keep=True)

    def claims_of(self, worker: str) -> list[tuple[Group, int]]:
        """In the library's order: by name, as text."""
        claims = [(f"{g.number}.{m + 1}", g, m) for g in self.live("reserved") for m in g.leased(worker)]
        return [(group, m) for _, group, m in sorted(claims, key=lambda claim: claim[0])]

    def leave(self, worker: str) -> None:
        self.draining.discard(worker)
        for group, m in self.claims_of(worker):
            self.reopen(group, m, failed=False, keep=True)

    def complete(self, group: Group, m: int, reward: float) -> tuple[str, int | None, int | None]:
        member = group.members[m]
        member.state, member.reward, member.prefix = "complete", reward, False
        done = [x for x in group.members if x.state == "complete"]
        if len(done) < self.config.group_size:
            return "open", None, None
        if self.config.filter_zero_variance and len({x.reward for x in done}) == 1:
            self.retire(group)
            self.filtered += 1
            return "filtered", None, None
        self.cancel_open(group)
        group.v = group.oldest()
        if self.config.post_process is not None:
            group.judgement = Member()
            self.lease(group, -1, member.worker, self.version)
            return "judging", None, None
        return self.settle(group)

    def judge(self, group: Group, keep: bool) -> tuple[str, int | None, int | None]:
        if keep:
            group.judgement = None
            return self.settle(group)
        self.retire(group)
        self.filtered += 1
        return "filtered", None, None

    def settle(self, group: Group) -> tuple[str, int | None, int | None]:
        place = self.occupy(group)
        if place is None:
            self.discarded += 1
            return "surplus", None, None
        if sum(1 for _ in self.of("occupied", place[0])) == self.config.batch_size:
            self.cancel_hopeless()
        return "occupied", place[0], place[1] + 1

    def occupy(self, group: Group) -> tuple[int, int] | None:
        found = self.find(group)
        assert found is not None
        _, g, gap = found
        self.cells(g)[gap] = None
        mover = next(
            (
                (b, i, other)
                for b in range(self.frontier, g + 1)
                if not self.ready(b)
                for i, other in self.of("reserved", b)
                if (b, i) < (g, gap) and other.v + self.config.eta >= g
            ),
            None,
        )
        if mover:
            b, i, other = mover
            self.cells(b)[i] = None
            self.put(g, gap, "reserved", other)
            self.close_hole(b, i)
        else:
            self.close_hole(g, gap)
        legal = [b for b in range(self.frontier, self.last(group.v) + 1) if not self.ready(b)]
        target = next((b for b in legal if self.empties(b)), None)
        if target is None:
            target = next((b for b in legal if b > g), None)
            if target is None:
                return None
            i, other = self.of("reserved", target)[0]
            self.cells(target)[i] = None
            self.put(g, self.empties(g)[-1], "reserved", other)
        slot = self.empties(target)[0]
        self.put(target, slot, "occupied", group)
        return target, slot

    def revive(self, ordinal: int) -> None:
        self.dead.remove(ordinal)
        self.requeued.append((ordinal, 0))

    def cancel_open(self, group: Group) -> None:
        group.judgement = None
        if (group, -1) in self.pending:
            self.pending.remove((group, -1))
        for m, member in enumerate(group.members):
            if member.state != "complete":
                member.state, member.worker, member.prefix = "cancelled", "", False
                if (group, m) in self.pending:
                    self.pending.remove((group, m))

    def cancel_hopeless(self) -> None:
        for group in self.live("reserved"):
            if all(self.ready(b) for b in range(self.frontier, group.v + self.config.eta + 1)):
                self.retire(group)
                self.discarded += 1

    def retire(self, group: Group) -> None:
        found = self.find(group)
        assert found is not None
        kind, buffer, i = found
        self.cancel_open(group)
        self.cells(buffer)[i] = None
        if kind == "reserved":
            self.close_hole(buffer, i)
        else:
            occupied = self.of("occupied", buffer)
            if occupied and occupied[-1][0] > i:
                self.cells(buffer)[occupied[-1][0]] = None
                self.put(buffer, i, "occupied", occupied[-1][1])
        self.pull_forward()

    def drop(self, group: Group) -> str:
        self.retire(group)
        if self.config.on_drop == "discard":
            self.discarded += 1
            return "discarded"
        if group.drops + 1 >= self.config.max_attempts:
            self.dead.append(group.ordinal)
            return "dead"
        self.requeued.append((group.ordinal, group.drops + 1))
        return "requeued"

    # -- the trainer --------------------------------------------------------------------------------

    def take(self) -> list[int] | None:
        if self.version in self.batches:
            return [g.number for g in self.batches[self.version]]
        n = self.frontier
        if not self.ready(n):
            if self.exhausted() and not self.live("reserved"):
                self.ended = True
            return None
        for i, group in self.of("reserved", n):
            later = [b for b in range(n + 1, self.last(group.v) + 1) if self.empties(b)]
            if later:
                self.cells(n)[i] = None
                self.put(later[-1], self.empties(later[-1])[-1], "reserved", group)
            else:
                self.retire(group)
                self.discarded += 1
        self.batches[n] = [g for _, g in self.of("occupied", n)]
        del self.buffers[n]
        self.frontier = n + 1
        return [g.number for g in self.batches[n]]

    def reject(self, group: Group) -> str:
        batch = self.batches.get(self.version, [])
        if group in batch:
            self.frontier = self.version
            for i, member in enumerate(self.batches.pop(self.version)):
                self.put(self.version, i, "occupied", member)
        return self.drop(group)

    def publish(self) -> None:
        self.version += 1
        self.trained += self.config.batch_size
        if self.config.total_steps is not None and self.version >= self.config.total_steps:
            self.ended = True

    def checkpointed(self) -> None:
        for batch in [b for b in self.batches if b < self.version]:
            del self.batches[batch]
