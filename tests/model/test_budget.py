"""Exact money: reserve at claim, settle at the end."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineshaft.errors import BudgetExceededError, InvalidInputError
from lineshaft.model.budget import (
    LARGEST_SUM,
    Ledger,
    Purse,
    money,
    over_task_limit,
    shortage,
    total_limit_reached,
)

NOTHING = Decimal(0)
sums = st.decimals(0, 1000, places=6, allow_nan=False)
small_sums = st.decimals(0, 20, places=6, allow_nan=False)


class TestMoney:
    @pytest.mark.parametrize(
        ("value", "text"),
        [
            (0.1, "0.100000"),
            (1, "1.000000"),
            ("45.00", "45.000000"),
            ("1e-3", "0.001000"),
            (1e-7, "0.000000"),
            ("0.0000005", "0.000001"),
            ("0.00000049", "0.000000"),
            (Decimal("-0.0"), "0.000000"),
            (LARGEST_SUM, "99999999.999999"),
        ],
    )
    def test_sums_have_six_places(self, value: Any, text: str) -> None:
        """U14: as numeric(14,6) keeps them, rounded as PostgreSQL rounds."""
        assert str(money(value)) == text

    @pytest.mark.parametrize(
        "value",
        [
            float("nan"),
            float("inf"),
            float("-inf"),
            -0.01,
            "-0.0000001",
            "NaN",
            "sNaN",
            "ten",
            "",
            100_000_000,
            "99999999.9999995",
            "1e999999999",
            pytest.param(10**5000, id="huge"),
            True,
            None,
            b"1",
        ],
    )
    def test_what_is_no_sum_is_refused(self, value: Any) -> None:
        with pytest.raises(InvalidInputError, match="cost_usd: must be a sum in US dollars from 0 to"):
            money(value, "cost_usd")

    @given(st.integers(0, 99_999_999_999_999))
    def test_floats_lose_nothing_on_the_way(self, millionths: int) -> None:
        """U14: whatever numeric(14,6) can hold comes back from JSON's floats as it was."""
        exact = Decimal(millionths).scaleb(-6)

        assert money(float(exact)) == exact

    @given(sums)
    def test_it_is_stable(self, amount: Decimal) -> None:
        assert money(money(amount)) == money(amount) == money(str(amount))


class TestLedger:
    def test_the_life_of_a_reservation(self) -> None:
        """R-234: reserve at claim, settle the actual cost, release the rest."""
        ledger = Ledger(total=Decimal(45)).reserve(Decimal("0.50"))
        assert (ledger.spent, ledger.reserved, ledger.remaining) == (
            NOTHING,
            Decimal("0.50"),
            Decimal("44.50"),
        )

        ledger = ledger.settle(Decimal("0.50"), Decimal("0.12"))
        assert (ledger.spent, ledger.reserved, ledger.remaining) == (
            Decimal("0.12"),
            NOTHING,
            Decimal("44.88"),
        )

        ledger = ledger.reserve(Decimal(1)).release(Decimal(1))
        assert (ledger.spent, ledger.reserved, ledger.remaining) == (
            Decimal("0.12"),
            NOTHING,
            Decimal("44.88"),
        )

    def test_two_claims_cannot_have_the_same_dollar(self) -> None:
        """F-27: the second check sees the first reservation."""
        ledger = Ledger(total=Decimal(1)).reserve(Decimal(1))

        assert not ledger.can_reserve(Decimal("0.000001"))
        with pytest.raises(BudgetExceededError, match=r"0\.000000 USD of 1\.000000 USD are left"):
            ledger.reserve(Decimal("0.000001"))

    def test_exactly_the_rest_can_be_reserved(self) -> None:
        """R-231: refused only if the budget is smaller than the maximum."""
        assert Ledger(total=Decimal(1)).can_reserve(Decimal(1))
        assert not Ledger(total=Decimal(1)).can_reserve(Decimal("1.000001"))

    def test_without_a_total_everything_fits_and_is_counted(self) -> None:
        """R-230: tracked even where nothing limits it."""
        ledger = (
            Ledger().reserve(Decimal(1_000_000)).settle(Decimal(1_000_000), Decimal(7)).top_up(Decimal(1))
        )

        assert (ledger.total, ledger.spent, ledger.remaining) == (None, Decimal(7), None)

    def test_a_missing_maximum_reserves_nothing_but_the_cost_is_booked(self) -> None:
        """R-233: the document's own check is a TypeError here."""
        ledger = Ledger(total=Decimal(1)).reserve(None)
        assert ledger.reserved == 0

        ledger = ledger.settle(None, Decimal("1.50"))
        assert (ledger.spent, ledger.remaining) == (Decimal("1.50"), Decimal("-0.50"))

    def test_an_overdrawn_ledger_affords_nothing_until_topped_up(self) -> None:
        """R-231: less than nothing is less than 0."""
        overdrawn = Ledger(total=Decimal(1), spent=Decimal(2))

        assert not overdrawn.can_reserve(None)
        assert overdrawn.top_up(Decimal(1)).can_reserve(None)
        assert not overdrawn.top_up(Decimal(1)).can_reserve(Decimal("0.000001"))

    def test_more_than_is_reserved_cannot_be_given_back(self) -> None:
        with pytest.raises(ValueError, match=r"only 1\.000000 USD are reserved"):
            Ledger(reserved=Decimal(1)).settle(Decimal(2), Decimal(0))

    @given(
        total=st.none() | small_sums,
        steps=st.lists(
            st.tuples(st.sampled_from(["reserve", "settle", "release"]), small_sums, st.booleans())
        ),
    )
    def test_books_balance_under_any_sequence(
        self, total: Decimal | None, steps: list[tuple[str, Decimal, bool]]
    ) -> None:
        """U14, R-234: sums are exact; the total is exceeded only by costs beyond their reservations."""
        ledger = Ledger(total=total)
        held: list[Decimal] = []
        spent = Fraction(0)
        excess = Fraction(0)
        for step, amount, overrun in steps:
            if step == "reserve":
                if not ledger.can_reserve(amount):
                    continue
                ledger = ledger.reserve(amount)
                held.append(amount)
            elif held and step == "settle":
                reservation = held.pop(0)
                actual = reservation + amount if overrun else min(amount, reservation)
                ledger = ledger.settle(reservation, actual)
                spent += Fraction(actual)
                excess += max(Fraction(actual - reservation), Fraction(0))
            elif held:
                ledger = ledger.release(held.pop())

            assert Fraction(ledger.spent) == spent
            assert Fraction(ledger.reserved) == sum(map(Fraction, held))
            if total is not None:
                assert spent + Fraction(ledger.reserved) <= Fraction(total) + excess

    @given(st.lists(sums, max_size=30))
    def test_giving_everything_back_leaves_no_crumbs(self, amounts: list[Decimal]) -> None:
        """R-234: the order doesn't matter and nothing is lost to rounding."""
        full = Ledger()
        for amount in amounts:
            full = full.reserve(amount)
        for amount in reversed(amounts):
            full = full.release(amount)

        assert full == Ledger()


class TestClaims:
    def test_both_purses_must_afford_it(self) -> None:
        """R-231, R-232, U14: the agent's budget and the DAG's ceiling, with what others have reserved."""
        rich, poor = (
            Ledger(total=Decimal(10)),
            Ledger(total=Decimal(10), spent=Decimal(6), reserved=Decimal(3)),
        )

        assert shortage(Decimal(1), agent=poor, dag=poor) is None
        assert shortage(Decimal(2), agent=poor, dag=rich) is Purse.AGENT
        assert shortage(Decimal(2), agent=rich, dag=poor) is Purse.DAG
        assert shortage(Decimal(2), agent=Ledger(), dag=Ledger()) is None
        assert shortage(None, agent=poor, dag=poor) is None

    @given(sums, small_sums, small_sums)
    def test_the_dag_rule_of_the_document(self, max_cost: Decimal, ceiling: Decimal, spent: Decimal) -> None:
        """R-232: not claimable exactly if spent + max_cost > ceiling."""
        dag = Ledger(total=ceiling, spent=spent)

        assert (shortage(max_cost, agent=Ledger(), dag=dag) is Purse.DAG) == (spent + max_cost > ceiling)


class TestLimits:
    def test_an_attempt_may_cost_its_maximum_and_no_more(self) -> None:
        """R-235."""
        assert not over_task_limit(Decimal("0.50"), Decimal("0.50"))
        assert over_task_limit(Decimal("0.500001"), Decimal("0.50"))
        assert not over_task_limit(Decimal(900), None)

    def test_the_total_over_all_attempts(self) -> None:
        """R-238: reached is enough."""
        spent = sum((Decimal("0.12"), Decimal("0.31"), Decimal("0.08")), Decimal(0))

        assert total_limit_reached(spent, Decimal("0.51"))
        assert not total_limit_reached(spent, Decimal("0.510001"))
        assert not total_limit_reached(spent, None)
