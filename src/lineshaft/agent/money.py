"""What an attempt has spent, and whether its money is used up."""

import threading
from decimal import Decimal

from lineshaft.agent.outcome import BudgetExceeded
from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import money
from lineshaft.types.work import UNREPORTED, RemainingBudgets, Spent

_ZERO = Decimal(0)


class Account:
    """Of one attempt. Counted from any thread; what is left elsewhere is as the database last said."""

    __slots__ = (
        "_allowance",
        "_lock",
        "_max_cost",
        "_purses",
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
        self._purses = RemainingBudgets()
        #: What this attempt may cost of what all attempts together may.
        self._allowance: Decimal | None = None

    def learn(self, purses: RemainingBudgets, cost: Decimal) -> None:
        """What was left when the attempt had cost so much."""
        self._purses = purses
        self._allowance = None if purses.task is None else purses.task + cost

    def add(self, cost: Decimal | float, tokens_input: int, tokens_output: int) -> Decimal:
        amount = money(cost, "spend")
        with self._lock:
            # Refused here, where the handler can be told, and not when all of it is to be written.
            total = Spent(
                self.cost + amount, self.tokens_input + tokens_input, self.tokens_output + tokens_output
            )
            if min(tokens_input, tokens_output) < 0:
                raise InvalidInputError(errors=[("tokens", "must be numbers from 0 on")])
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
        """What the ledgers don't know of yet."""
        return max(self.cost - self.reserved, _ZERO)

    def check(self, unbooked_agent: Decimal, unbooked_dag: Decimal) -> None:
        """Raise BudgetExceeded when there is nothing left to start something on.

        `unbooked_…` is what this process's tasks of the same agent and of the same DAG have spent beyond
        their reservations. A task with a maximum of its own has that much reserved, so only its own counts.
        """
        if self._max_cost is not None:
            if self.cost and self.cost >= self._max_cost:
                raise BudgetExceeded(
                    f"The task may cost {self._max_cost} USD and has cost {self.cost} USD: nothing is left "
                    "for another step. Raise max_cost_usd, or do it in cheaper steps."
                )
        else:
            self._check_purse("agent", self._purses.agent, unbooked_agent, "Add to the agent's budget_usd.")
            self._check_purse("DAG", self._purses.dag, unbooked_dag, "Raise the DAG's budget_ceiling_usd.")
        if self._allowance is not None and self.cost and self.cost >= self._allowance:
            raise BudgetExceeded(
                "All attempts together have used up the task's max_total_cost_usd: this one cost "
                f"{self.cost} USD of the {self._allowance} USD that were left. Raise it."
            )

    def _check_purse(self, whose: str, left: Decimal | None, unbooked: Decimal, remedy: str) -> None:
        if left is None:
            return
        rest = left - unbooked
        # Exactly nothing left is enough for what costs nothing.
        if rest < 0 or (rest == 0 and self.cost):
            raise BudgetExceeded(
                f"The {whose}'s money is used up: {rest} USD are left, and this attempt has spent "
                f"{self.cost} USD. {remedy}"
            )
