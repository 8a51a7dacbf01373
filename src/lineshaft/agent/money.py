"""What an attempt has spent, and whether money is left."""

import threading
from decimal import Decimal

from lineshaft.agent.outcome import BudgetExceeded
from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import money
from lineshaft.types.work import UNREPORTED, RemainingBudgets, Spent

_ZERO = Decimal(0)


class Account:
    """The money of one attempt. May be charged from any thread; budgets are as the database last reported."""

    __slots__ = (
        "_allowance",
        "_lock",
        "_max_cost",
        "_remaining",
        "cost",
        "reserved",
        "tokens_input",
        "tokens_output",
    )

    def __init__(self, max_cost: Decimal | None, reserved: Decimal) -> None:
        self._max_cost = max_cost
        self._lock = threading.Lock()
        self.reserved = reserved
        self.cost = _ZERO
        self.tokens_input = 0
        self.tokens_output = 0
        self._remaining = RemainingBudgets()
        #: What this attempt may cost under `max_total_cost_usd`.
        self._allowance: Decimal | None = None

    def learn(self, remaining: RemainingBudgets, cost: Decimal) -> None:
        """Remember what was left when the attempt had cost this much."""
        self._remaining = remaining
        self._allowance = None if remaining.task is None else remaining.task + cost

    def add(self, cost: Decimal | float, tokens_input: int, tokens_output: int) -> Decimal:
        amount = money(cost, "spend")
        with self._lock:
            # Checked here, where the error reaches the handler, and not when the total is written.
            total = Spent(
                self.cost + amount, self.tokens_input + tokens_input, self.tokens_output + tokens_output
            )
            if min(tokens_input, tokens_output) < 0:
                raise InvalidInputError(errors=[("tokens", "must be numbers of at least 0")])
            self.cost = self.cost + amount
            self.tokens_input, self.tokens_output = total.tokens_input, total.tokens_output
        return amount

    @property
    def spent(self) -> Spent:
        if not self.cost and not self.tokens_input and not self.tokens_output:
            return UNREPORTED
        return Spent(self.cost, self.tokens_input, self.tokens_output)

    @property
    def unreserved(self) -> Decimal:
        """What exceeds the reservation, and is not in the budgets yet."""
        return max(self.cost - self.reserved, _ZERO)

    def check(self, unbooked_agent: Decimal, unbooked_dag: Decimal) -> None:
        """Raise BudgetExceeded if no money is left for another step.

        `unbooked_…` is what this process's tasks of the same agent and of the same DAG have spent beyond
        their reservations. A task with `max_cost_usd` has that much reserved, so only its own cost counts.
        """
        if self._max_cost is not None:
            if self.cost and self.cost >= self._max_cost:
                raise BudgetExceeded(
                    f"The task may cost {self._max_cost} USD and has cost {self.cost} USD: no money is left "
                    "for another step. Raise max_cost_usd, or use cheaper steps."
                )
        else:
            self._check("agent", self._remaining.agent, unbooked_agent, "Add to the agent's budget_usd.")
            self._check("DAG", self._remaining.dag, unbooked_dag, "Raise the DAG's budget_ceiling_usd.")
        if self._allowance is not None and self.cost and self.cost >= self._allowance:
            raise BudgetExceeded(
                "All attempts together have used up the task's max_total_cost_usd: this attempt cost "
                f"{self.cost} USD of the {self._allowance} USD that were left. Raise max_total_cost_usd."
            )

    def _check(self, whose: str, left: Decimal | None, unbooked: Decimal, remedy: str) -> None:
        if left is None:
            return
        rest = left - unbooked
        # With exactly nothing left, a step may still run if it costs nothing.
        if rest < 0 or (rest == 0 and self.cost):
            raise BudgetExceeded(
                f"The {whose}'s budget is used up: {rest} USD are left, and this attempt has spent "
                f"{self.cost} USD. {remedy}"
            )
