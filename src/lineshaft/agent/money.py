"""What an attempt has spent, and whether money is left."""

import threading
from decimal import Decimal

from lineshaft.agent.outcome import BudgetExceeded, SharedBudgetExceeded
from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import money
from lineshaft.types.work import UNREPORTED, RemainingBudgets, Spent

_ZERO = Decimal(0)
#: Limits of the task itself: an attempt that is over one of them fails. Over all others it is released.
OWN_LIMITS = frozenset({"max_cost", "max_total_cost"})
_LIMITS = {
    "max_cost": "the task's max_cost_usd",
    "max_total_cost": "the task's max_total_cost_usd",
    "agent_budget": "the agent's budget",
    "dag_budget": "the DAG's budget",
    "daily_budget": "the daily budget",
    "velocity": "the limit on cost velocity",
}


def over_limit_text(reason: str, cost: Decimal | None) -> str:
    """Why an attempt must stop, from the answer to a heartbeat."""
    return f"cost {_usd(cost)}: over {_LIMITS.get(reason, reason)}"


def _usd(amount: Decimal | None) -> str:
    return f"{(amount or _ZERO).normalize():f} USD"


class Account:
    """The money of one attempt. May be charged from any thread; budgets are as the database last reported."""

    __slots__ = (
        *("_allowance", "_is_known", "_lock", "_max_cost", "_remaining"),
        *("cost", "tokens_input", "tokens_output"),
    )

    def __init__(self, max_cost: Decimal | None) -> None:
        self._max_cost = max_cost
        self._lock = threading.Lock()
        self.cost = _ZERO
        #: Whether a cost was reported, and not only tokens.
        self._is_known = False
        self.tokens_input = 0
        self.tokens_output = 0
        self._remaining = RemainingBudgets()
        #: What this attempt may cost under `max_total_cost_usd`.
        self._allowance: Decimal | None = None

    def learn(self, remaining: RemainingBudgets, cost: Decimal) -> None:
        """Remember what was left when the attempt had cost this much."""
        self._remaining = remaining
        self._allowance = None if remaining.task is None else remaining.task + cost

    def add(self, cost: Decimal | float | None, tokens_input: int, tokens_output: int) -> Decimal:
        amount = _ZERO if cost is None else money(cost, "spend")
        with self._lock:
            # Checked here, where the error reaches the handler, and not when the total is written.
            total = Spent(
                self.cost + amount, self.tokens_input + tokens_input, self.tokens_output + tokens_output
            )
            if min(tokens_input, tokens_output) < 0:
                raise InvalidInputError(errors=[("tokens", "must be numbers of at least 0")])
            self.cost = self.cost + amount
            self._is_known = self._is_known or cost is not None
            self.tokens_input, self.tokens_output = total.tokens_input, total.tokens_output
        return amount

    @property
    def spent(self) -> Spent:
        if not self.cost and not self.tokens_input and not self.tokens_output:
            return UNREPORTED
        return Spent(self.cost if self._is_known else None, self.tokens_input, self.tokens_output)

    def check_limits(self) -> None:
        """Raise BudgetExceeded if the attempt has cost more than the task allows."""
        if self._max_cost is not None and self.cost > self._max_cost:
            raise BudgetExceeded(
                f"The task may cost {_usd(self._max_cost)} and has cost {_usd(self.cost)}. "
                "Raise max_cost_usd."
            )
        if self._allowance is not None and self.cost > self._allowance:
            raise self._total_used_up()

    def check_next_step(self) -> None:
        """Raise BudgetExceeded if no money is left for another step.

        A task with a limit of its own has that much reserved, so only its own cost counts.
        """
        if self._max_cost is not None:
            if self.cost and self.cost >= self._max_cost:
                raise BudgetExceeded(
                    f"The task may cost {_usd(self._max_cost)} and has cost {_usd(self.cost)}: no money is "
                    "left for another step. Raise max_cost_usd, or use cheaper steps."
                )
        elif self._allowance is None:
            self._check("agent", self._remaining.agent, "Add to the agent's budget_usd.")
            self._check("DAG", self._remaining.dag, "Raise the DAG's budget_ceiling_usd.")
        if self._allowance is not None and self.cost and self.cost >= self._allowance:
            raise self._total_used_up()

    def _total_used_up(self) -> BudgetExceeded:
        return BudgetExceeded(
            "All attempts together have used up the task's max_total_cost_usd: this attempt cost "
            f"{_usd(self.cost)} of the {_usd(self._allowance)} that were left. Raise max_total_cost_usd."
        )

    def _check(self, whose: str, left: Decimal | None, remedy: str) -> None:
        # With exactly nothing left, a step may still run if it costs nothing.
        if left is not None and (left < 0 or (left == 0 and self.cost)):
            raise SharedBudgetExceeded(
                f"The {whose}'s budget is used up: {_usd(left)} are left, and this attempt has spent "
                f"{_usd(self.cost)}. {remedy}"
            )
