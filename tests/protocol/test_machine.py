"""Random histories of the real library against the plain model, with every invariant after every step."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import HealthCheck, Phase, assume, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from roq import Fenced, Reservation, Response, RunConfig, RunEnded, Scheduler
from roq.protocol.keys import keys_of
from tests.conftest import KINDS, Server
from tests.protocol.model import Group, Member, Model
from tests.protocol.play import expire, trajectory

WORKERS = ("w0", "w1", "w2")
runs = itertools.count()


@st.composite
def configs(draw: st.DrawFn) -> RunConfig:
    batch = draw(st.integers(1, 3))
    group = draw(st.integers(1, 2))
    return RunConfig(
        eta=draw(st.integers(0, 3)),
        batch_size=batch,
        group_size=group,
        buffer_slots=batch + draw(st.sampled_from([0, 0, 1, 2])),
        group_candidates=group + draw(st.sampled_from([0, 0, 1])),
        prompts=draw(st.sampled_from([None, None, 6, 15])),
        total_steps=draw(st.sampled_from([None, None, 4])),
        max_inflight=draw(st.sampled_from([None, None, 3])),
        max_attempts=draw(st.sampled_from([2, 8])),
        pause_after_failures=None,
        on_drop=draw(st.sampled_from(["requeue", "discard"])),
        filter_zero_variance=group > 1 and draw(st.booleans()),
        post_process=draw(st.sampled_from([None, "module:function"])),
    )


class Machine(RuleBasedStateMachine):
    """Workers, a trainer and an operator that make valid calls in any order."""

    server: Server

    @initialize(config=configs())
    def create(self, config: RunConfig) -> None:
        self.server.redis.flushdb()
        self.sched = Scheduler(self.server.url, f"m{next(runs)}")
        self.sched.create(config)
        self.model = Model(config)
        self.claims: list[Reservation] = []
        self.stale: list[Reservation] = []

    def teardown(self) -> None:
        if hasattr(self, "sched"):
            assert self.sched.audit().problems == []
            self.sched.close()

    def held(self, claim: Reservation) -> tuple[Group, Member]:
        groups = [*self.model.live("reserved"), *self.model.live("occupied")]
        group = next(g for g in groups if g.number == claim.group)
        return group, group.part(claim.member - 1)

    def members(self) -> list[Reservation]:
        """Claims on trajectories, not on the post-processing of groups."""
        return [claim for claim in self.claims if claim.member > 0]

    def judgements(self) -> list[Reservation]:
        return [claim for claim in self.claims if claim.member == 0]

    def sort_claims(self) -> None:
        """Claims that the model no longer knows as leased are stale."""
        current = {(g.number, g.part(m).token) for g in self.model.live("reserved") for m in g.leased("")}
        for claim in [c for c in self.claims if (c.group, c.token) not in current]:
            self.claims.remove(claim)
            self.stale.append(claim)

    @rule(worker=st.sampled_from(WORKERS), lag=st.integers(0, 2), limit=st.integers(1, 5))
    def reserve(self, worker: str, lag: int, limit: int) -> None:
        version = max(0, self.model.version - lag)
        expected, why = self.model.reserve(worker, version, limit)
        grant = self.sched.reserve(worker, version, limit)
        assert [(r.group, r.member, r.token) for r in grant.reservations] == expected
        assert grant.refused == why
        for claim in grant.reservations:
            group, member = self.held(claim)
            assert (claim.ordinal, claim.v_traj) == (group.ordinal, group.v)
            assert (claim.prefix is not None) == member.prefix
        self.claims += grant.reservations

    @precondition(lambda self: self.members())
    @rule(data=st.data(), reward=st.sampled_from([0.0, 1.0, 1 / 3, 0.1 + 0.2]), again=st.booleans())
    def complete(self, data: st.DataObject, reward: float, again: bool) -> None:
        claim = data.draw(st.sampled_from(self.members()))
        group, member = self.held(claim)
        assert member.v is not None
        payload = trajectory(member.v, reward)
        status, buffer, slot = self.model.complete(group, claim.member - 1, reward)
        done = self.sched.complete(claim, payload)
        assert (done.status, done.buffer, done.slot) == (status, buffer, slot)
        if again and status in ("open", "occupied", "judging"):
            assert self.sched.complete(claim, payload) == msgspec.structs.replace(done, ready=None)
        if done.judgement is not None:
            assert (done.judgement.group, done.judgement.member) == (claim.group, 0)
            self.claims.append(done.judgement)
        self.sort_claims()

    @precondition(lambda self: self.judgements())
    @rule(data=st.data(), keep=st.booleans(), advantages=st.booleans())
    def judge(self, data: st.DataObject, keep: bool, advantages: bool) -> None:
        claim = data.draw(st.sampled_from(self.judgements()))
        group, _ = self.held(claim)
        assert len(self.sched.group_trajectories(claim.group)) == self.model.config.group_size
        given = [0.1 + 0.2] * self.model.config.group_size if advantages else None
        expected = self.model.judge(group, keep)
        done = self.sched.judge(claim, keep=keep, reason="dull", advantages=given)
        assert (done.status, done.buffer, done.slot) == expected
        self.sort_claims()

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        group, member = self.held(claim)
        prefix = None
        if keep and member.v is not None:
            member.prefix = True
            prefix = Response([1], [-1.0], [(member.v, 1)])
        expected = self.model.reopen(group, claim.member - 1, failed=False, keep=True)
        assert self.sched.release(claim, prefix).status == expected
        self.sort_claims()

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        group, _ = self.held(claim)
        expected = self.model.reopen(group, claim.member - 1, failed=True, keep=False)
        assert self.sched.fail(claim, "test").status == expected
        self.sort_claims()

    @precondition(lambda self: self.members())
    @rule(data=st.data())
    def save_prefix(self, data: st.DataObject) -> None:
        claim = data.draw(st.sampled_from(self.members()))
        _, member = self.held(claim)
        assert member.v is not None
        self.sched.save_prefix(claim, Response([1], [-1.0], [(member.v, 1)]))
        member.prefix = True

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted({c.worker for c in self.claims})))
        expire(self.sched, worker)
        self.sched.renew("observer")
        self.model.expire(worker)
        self.sort_claims()

    @precondition(lambda self: self.stale)
    @rule(data=st.data())
    def late_call(self, data: st.DataObject) -> None:
        """Calls of a superseded worker change nothing."""
        claim = data.draw(st.sampled_from(self.stale))
        with pytest.raises(Fenced):
            self.sched.release(claim)

    @rule()
    def take(self) -> None:
        over = self.model.ended and self.model.version not in self.model.batches
        if over:
            with pytest.raises(RunEnded):
                self.sched.take("t")
            return
        expected = self.model.take()
        batch = self.sched.take("t")
        assert (None if batch is None else [g.group for g in batch.groups]) == expected
        if batch is not None:
            assert all(g.staleness <= self.model.config.eta for g in batch.groups)
            assert all(len(g.members) == self.model.config.group_size for g in batch.groups)
            payloads = self.sched.trajectories(batch.groups)
            for group, members in zip(batch.groups, payloads, strict=True):
                assert [m.reward for m in group.members] == [t.reward for t in members]
        self.sort_claims()

    @precondition(lambda self: self.model.frontier > self.model.version)
    @rule(again=st.booleans())
    def publish(self, again: bool) -> None:
        self.model.publish()
        for _ in range(1 + again):
            self.sched.publish(self.model.version, f"w/{self.model.version}", "t")

    @precondition(lambda self: self.model.version > 0)
    @rule()
    def checkpointed(self) -> None:
        self.sched.checkpointed(self.model.version, "t")
        self.model.checkpointed()

    @rule(data=st.data())
    def filter(self, data: st.DataObject) -> None:
        occupied = self.model.live("occupied")
        assume(occupied)
        group = data.draw(st.sampled_from(occupied))
        self.model.retire(group)
        self.model.filtered += 1
        assert self.sched.filter(group.number, "test").status == "filtered"

    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        reserved = self.model.live("reserved")
        assume(reserved)
        group = data.draw(st.sampled_from(reserved))
        expected = self.model.drop(group)
        assert self.sched.drop(group.number, "test").status == expected
        self.sort_claims()

    @rule(data=st.data(), again=st.booleans())
    def reject(self, data: st.DataObject, again: bool) -> None:
        """From the batch in training or before; another trainer's batch is the same as this one's."""
        finished = [*self.model.live("occupied"), *self.model.batches.get(self.model.version, [])]
        assume(finished)
        group = data.draw(st.sampled_from(finished))
        expected = self.model.reject(group)
        assert self.sched.reject(group.number, "test").status == expected
        if again:
            with pytest.raises(Fenced):
                self.sched.reject(group.number, "test")

    @rule(worker=st.sampled_from(WORKERS))
    def leave(self, worker: str) -> None:
        self.sched.leave(worker)
        self.model.leave(worker)
        self.sort_claims()

    @rule(worker=st.sampled_from(WORKERS))
    def drain(self, worker: str) -> None:
        self.sched.renew(worker)
        self.sched.drain(worker)
        self.model.draining.add(worker)
        assert self.sched.renew(worker).draining

    @precondition(lambda self: self.model.dead and not self.model.ended)
    @rule(data=st.data())
    def revive(self, data: st.DataObject) -> None:
        ordinal = data.draw(st.sampled_from(self.model.dead))
        assert ordinal in [letter.ordinal for letter in self.sched.dead()]
        self.sched.revive(ordinal)
        self.model.revive(ordinal)

    @rule()
    def pause(self) -> None:
        self.model.paused = not self.model.paused
        (self.sched.pause if self.model.paused else self.sched.resume)()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "model"):
            return
        assert self.sched.verify() == []
        status = self.sched.status()
        model, ledger = self.model, status.ledger
        assert (status.version, status.frontier, status.ended) == (model.version, model.frontier, model.ended)
        real = {
            place.decode(): content.decode()
            for place, content in self.server.redis.hgetall(keys_of(self.sched.run)["slots"]).items()
        }
        assert real == {
            f"{b}.{i + 1}": f"{cell[0]} {cell[1].number}"
            for b, cells in model.buffers.items()
            for i, cell in enumerate(cells)
            if cell
        }
        assert ledger.balanced
        assert (ledger.issued, ledger.trained, ledger.filtered, ledger.discarded, ledger.dead) == (
            model.next_ordinal,
            model.trained,
            model.filtered,
            model.discarded,
            len(model.dead),
        )
        assert (status.pending, status.inflight) == (len(model.pending), model.inflight())


@pytest.mark.parametrize("kind", KINDS)
def test_against_the_model(kind: str, servers: Callable[[str], Server]) -> None:
    machine = type(f"Machine_{kind}", (Machine,), {"server": servers(kind)})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink],
            print_blob=True,
        ),
    )
