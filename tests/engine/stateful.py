"""How many histories a stateful test goes through."""

from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.examples import examples


@dataclass(frozen=True)
class Histories:
    #: None: few, and the same each time.
    many: int | None

    def run(self, machine: type[RuleBasedStateMachine], *, few: int, steps: int) -> None:
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=self.many or examples(few),
                stateful_step_count=2 * steps if self.many else steps,
                deadline=None,
                derandomize=self.many is None,
                database=None,
                print_blob=True,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            ),
        )
