"""What a call cost: by the operator's prices, as the provider reports it, or by the bundled list."""

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from genai_prices import calc_price
from pydantic_ai.messages import ModelResponse

from lineshaft.integrations.llm.configuration import Price

_MILLION = Decimal(1_000_000)


def cost_of(response: ModelResponse, prices: Mapping[str, Price], asked: str | None = None) -> Decimal | None:
    """US dollars; None: unknown, which is never the same as nothing.

    `asked`: the name under which the model was asked for, where it differs from the one in the response.
    """
    usage = response.usage
    price = next((prices[name] for name in _names(response, asked) if name in prices), None)
    if price is not None:
        return None if usage.unmeasured_requests else _priced(response, price)
    if (reported := _amount((response.provider_details or {}).get("cost"))) is not None:
        return reported
    if usage.unmeasured_requests:
        return None
    if usage.cost is not None:
        return usage.cost
    return _listed(response, asked)


def _names(response: ModelResponse, asked: str | None) -> list[str]:
    names = [response.model_name, asked]
    if response.model_name and response.provider_name:
        names.insert(0, f"{response.provider_name}:{response.model_name}")
    if asked and ":" in asked:
        names.append(asked.partition(":")[2])
    return [name for name in names if name]


def _priced(response: ModelResponse, price: Price) -> Decimal:
    usage = response.usage
    cached = min(usage.cache_read_tokens, usage.input_tokens)
    per_cached = price.input if price.cached_input is None else price.cached_input
    return (
        (usage.input_tokens - cached) * price.input + cached * per_cached + usage.output_tokens * price.output
    ) / _MILLION


def _listed(response: ModelResponse, asked: str | None) -> Decimal | None:
    try:
        return Decimal(response.cost().total_price)
    except (AssertionError, LookupError, ValueError, TypeError):
        pass
    # A proxy or a gateway: its address is in no list, the model's name may be.
    for name in _names(response, asked):
        try:
            return Decimal(calc_price(response.usage, name).total_price)
        except (LookupError, ValueError, TypeError):
            continue
    return None


def _amount(value: Any) -> Decimal | None:
    """What an endpoint reports as the cost, if it is an amount."""
    if value is None or isinstance(value, bool):
        return None
    try:
        amount = Decimal(str(value))
    except InvalidOperation:
        return None
    return amount if amount.is_finite() and amount >= 0 else None
