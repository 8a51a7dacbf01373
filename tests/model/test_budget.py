"""Exact amounts of money, and the cost limits of one task."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lineshaft.errors import InvalidInputError
from lineshaft.model.budget import LARGEST_AMOUNT, money, over_task_limit, total_limit_reached

sums = st.decimals(0, 1000, places=6, allow_nan=False)


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
            (LARGEST_AMOUNT, "99999999.999999"),
        ],
    )
    def test_amounts_have_six_places(self, value: Any, text: str) -> None:
        """U14: like numeric(14,6), rounded as PostgreSQL rounds."""
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
    def test_an_invalid_amount_is_rejected(self, value: Any) -> None:
        with pytest.raises(InvalidInputError, match="cost_usd: must be an amount in US dollars from 0 to"):
            money(value, "cost_usd")

    @given(st.integers(0, 99_999_999_999_999))
    def test_floats_lose_no_precision(self, millionths: int) -> None:
        """U14: every numeric(14,6) survives the conversion to a JSON float and back."""
        exact = Decimal(millionths).scaleb(-6)

        assert money(float(exact)) == exact

    @given(sums)
    def test_conversion_is_idempotent(self, amount: Decimal) -> None:
        assert money(money(amount)) == money(amount) == money(str(amount))


class TestLimits:
    def test_an_attempt_may_cost_its_maximum_and_no_more(self) -> None:
        """R-235."""
        assert not over_task_limit(Decimal("0.50"), Decimal("0.50"))
        assert over_task_limit(Decimal("0.500001"), Decimal("0.50"))
        assert not over_task_limit(Decimal(900), None)

    def test_the_total_over_all_attempts(self) -> None:
        """R-238: the limit itself is already too much."""
        spent = sum((Decimal("0.12"), Decimal("0.31"), Decimal("0.08")), Decimal(0))

        assert total_limit_reached(spent, Decimal("0.51"))
        assert not total_limit_reached(spent, Decimal("0.510001"))
        assert not total_limit_reached(spent, None)
