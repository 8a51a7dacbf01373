"""The lifecycle with gates: outputs wait for validators and for people.

Validators take outputs, come to a verdict or to none, fall behind others or die; people approve and refuse; a
process dies between taking an output and looking at it. Whatever counts moves the task as the model says;
whatever comes too late changes nothing.
"""

from datetime import timedelta
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from lineshaft.checks.registry import Checks
from lineshaft.checks.verdict import CandidateOutput, Verdict
from lineshaft.engine.review.gated_output import GatedOutput
from lineshaft.types import ApprovalDecision
from lineshaft.types.work import ClaimRef, Completion, Moved
from tests.engine.transition.lifecycle_machine import Lifecycle, Task
from tests.world import without_gates

LEASE_SEC = 60.0
PAUSE_SEC = 5.0


async def slow(_: Any, __: CandidateOutput) -> bool:
    raise AssertionError("validators of this test say what they want")


class Gated(Lifecycle):
    gates = st.sampled_from(
        [(), (), ("regex",), ("slow",), ("human",), ("regex", "slow", "human"), ("slow", "regex", "slow")]
    )

    def checks(self) -> Checks:
        found = Checks()
        found.register("slow", slow)
        return found

    @initialize()
    def start_validators(self) -> None:
        #: Outputs as validators have taken them; what they know may be old.
        self.taken: list[GatedOutput] = []

    def waiting(self, method: str) -> list[str]:
        return [name for name, task in self.tasks.items() if task.waits_for == method]

    # Completing.

    @precondition(lambda self: self.held())
    @rule(data=st.data(), good=st.booleans())
    def complete(self, data: st.DataObject, good: bool) -> None:
        name = data.draw(st.sampled_from(self.held()))
        task = self.tasks[name]
        if task.status == "RUNNING":
            task.good = good or "regex" not in task.gates
        answers = [
            self.record_output(name, task) for _ in range(2)
        ]  # the answer may have been lost on the way
        self.walk(name, 0)
        assert [answer.unwrap() for answer in answers] == [task.status] * 2

    @precondition(lambda self: any(task.status == "RUNNING" and task.gates for task in self.tasks.values()))
    @rule(data=st.data(), good=st.booleans())
    def complete_and_die(self, data: st.DataObject, good: bool) -> None:
        """The output is stored and unchecked; the agent holds the task until it goes on or is reaped."""
        found = [name for name, task in self.tasks.items() if task.status == "RUNNING" and task.gates]
        name = data.draw(st.sampled_from(found))
        task = self.tasks[name]
        task.good = good or "regex" not in task.gates
        (moved,) = self.runner.run(without_gates(self.engine).complete([self.completion(name, task)]))
        assert moved.unwrap() == "VALIDATING"
        task.status = "VALIDATING"

    def held(self) -> list[str]:
        return [name for name, task in self.tasks.items() if task.agent is not None]

    def completion(self, name: str, task: Task) -> Completion:
        return Completion(ClaimRef(name, task.epoch), b'"good"' if task.good else b'"bad"')

    def record_output(self, name: str, task: Task) -> Moved:
        (moved,) = self.runner.run(self.engine.work.complete([self.completion(name, task)]))
        return moved

    def walk(self, name: str, number: int) -> None:
        """The output comes to this gate, and as far from there as checks answer at once."""
        task = self.tasks[name]
        for gate_no, method in list(enumerate(task.gates))[number:]:
            if method == "regex" and not task.good:
                self.refused(name)
                return
            if method != "regex":
                self.let_go(name, "VALIDATING")
                self.probe_told_nothing(name)
                task.gate_no, task.waits_for, task.runs = gate_no, method, 0
                task.due = self.clock.now() if method == "slow" else None
                return
        self.completed(name)

    def refused(self, name: str) -> None:
        self.attempt_failed(name)
        if self.tasks[name].status == "DEAD_LETTERED":
            self.ended(name)

    def let_go(self, name: str, status: str) -> Task:
        self.tasks[name].waits_for = None
        return super().let_go(name, status)

    # Validators.

    @precondition(lambda self: self.waiting("slow"))
    @rule(limit=st.integers(1, 3))
    def validators_take(self, limit: int) -> None:
        due = [name for name in self.waiting("slow") if self.tasks[name].due <= self.clock.now()]  # type: ignore[operator]
        taken = self.runner.run(self.engine.gates.take(limit=limit, lease_sec=LEASE_SEC))
        assert len(taken) == min(limit, len(due))
        for output in taken:
            task = self.tasks[output.id]
            assert output.id in due
            task.runs, task.due = task.runs + 1, self.clock.now() + timedelta(seconds=LEASE_SEC)
            assert (output.epoch, output.gate_no, output.gate_runs) == (task.epoch, task.gate_no, task.runs)
            self.taken.append(output)

    def one_taken(self, data: st.DataObject) -> tuple[GatedOutput, Task, bool]:
        """An output that a validator has taken, and whether it is still at the same gate."""
        output = data.draw(st.sampled_from(self.taken))
        task = self.tasks[output.id]
        is_there = task.waits_for == "slow" and (task.epoch, task.gate_no) == (output.epoch, output.gate_no)
        return output, task, is_there

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), passed=st.booleans())
    def a_validator_says(self, data: st.DataObject, passed: bool) -> None:
        """Also one that was given up for dead: its verdict counts if it is the first."""
        output, task, is_there = self.one_taken(data)
        moved = self.runner.run(self.engine.gates.settle(output, Verdict(passed=passed)))
        self.taken.remove(output)
        if not is_there:
            return
        if passed:
            self.walk(output.id, output.gate_no + 1)
        else:
            self.refused(output.id)
        assert moved.unwrap() == task.status

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def a_validator_has_no_verdict(self, data: st.DataObject) -> None:
        output, task, is_there = self.one_taken(data)
        counts = is_there and task.runs == output.gate_runs
        postponed = self.engine.gates.postpone(output, "the judge is away", delay_sec=PAUSE_SEC)
        assert self.runner.run(postponed) is counts
        if counts:
            task.due = self.clock.now() + timedelta(seconds=PAUSE_SEC)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def a_validator_needs_longer(self, data: st.DataObject) -> None:
        output, task, is_there = self.one_taken(data)
        counts = is_there and task.runs == output.gate_runs
        renewed = self.runner.run(self.engine.gates.renew([output], lease_sec=LEASE_SEC))
        assert renewed == ({output.id} if counts else set())
        if counts:
            task.due = self.clock.now() + timedelta(seconds=LEASE_SEC)

    @precondition(lambda self: self.taken)
    @rule(known=st.booleans())
    def validators_die(self, known: bool) -> None:
        """Their leases run out; some come back from the dead and say something later."""
        self.clock.advance(LEASE_SEC)
        # Claims promote retries that became due in the meantime, but only if they come short.
        self.promoted()
        if not known:
            self.taken.clear()

    # People.

    @precondition(lambda self: self.waiting("human"))
    @rule(data=st.data(), approve=st.booleans())
    def a_person_decides(self, data: st.DataObject, approve: bool) -> None:
        name = data.draw(st.sampled_from(self.waiting("human")))
        task = self.tasks[name]
        gate_no = task.gate_no
        status = self.runner.run(self.engine.approvals.decide(name, ApprovalDecision(approve, "ann")))
        if approve:
            self.walk(name, gate_no + 1)
        else:
            self.refused(name)
        assert status == task.status

    @invariant()
    def outputs_stand_where_the_model_has_them(self) -> None:
        if not hasattr(self, "look"):
            return
        rows = self.look.execute(
            "SELECT task_id, gate, gate_no, gate_runs, gate_due_at FROM lineshaft.attempt"
            " WHERE outcome = 'validating' AND gate IS NOT NULL"
        ).fetchall()
        assert {row[0]: tuple(row[1:]) for row in rows} == {
            name: (task.waits_for, task.gate_no, task.runs, task.due)
            for name, task in self.tasks.items()
            if task.waits_for is not None
        }
        people = self.runner.run(self.engine.approvals.waiting()).items
        assert {item.task.id for item in people} == set(self.waiting("human"))
