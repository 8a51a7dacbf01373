"""Which models there are, and how to reach them.

It imports no library of models, so that any process may check it.
"""

from dataclasses import dataclass, field
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

import msgspec

from lineshaft.errors import SettingsError
from lineshaft.settings import Settings

INSTALL = "pip install 'lineshaft[llm]'"


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """US dollars per million tokens."""

    input: Decimal
    output: Decimal
    #: Input that the provider had in its cache. None: as `input`.
    cached_input: Decimal | None = None

    def __post_init__(self) -> None:
        for amount in (self.input, self.output, self.cached_input):
            if amount is not None and not (amount.is_finite() and amount >= 0):
                raise ValueError(f"a price must be an amount of dollars of at least 0, got {amount}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMConfig:
    #: Used unless another is named: PROVIDER:MODEL, or a name that the API at `url` knows.
    model: str | None = None
    #: Tried in this order when a model can't answer.
    fallback_models: tuple[str, ...] = ()
    #: An OpenAI-compatible API, for names without a provider.
    url: str | None = None
    #: The key of `url`. Other providers read theirs from their usual variables.
    api_key: str | None = field(default=None, repr=False)
    #: The operator's prices, by the name of the model. They win over all others.
    prices: dict[str, Price] = field(default_factory=dict)
    #: How long a call may take.
    timeout_sec: float = 600.0

    def __post_init__(self) -> None:
        parts = urlsplit(self.url or "")
        if "@" in parts.netloc or parts.query or parts.fragment:
            # The address is recorded with each answer.
            raise SettingsError(
                "LINESHAFT_LLM_URL must be a plain address, such as https://api.example.com/v1, without a "
                "user, a password or a query. Put the key into LINESHAFT_LLM_API_KEY."
            )
        for name in (self.model, *self.fallback_models):
            if name is not None:
                self.check(name)

    def named(self, name: str | None = None) -> str:
        """This model, or the configured one; raises SettingsError if there is none."""
        if (name := name or self.model) is None:
            raise SettingsError(
                "No model is configured. Set LINESHAFT_LLM_MODEL, for instance to openai:gpt-5-mini with the "
                "key in OPENAI_API_KEY, or to a model of the OpenAI-compatible API in LINESHAFT_LLM_URL."
            )
        return name

    def check(self, name: str) -> None:
        """Raise SettingsError if nothing says where a model is."""
        if self.url is None and ":" not in name:
            raise SettingsError(
                f"Nothing says where the model {name!r} is. Name its provider, as in openai:{name} or "
                f"anthropic:{name}, or set LINESHAFT_LLM_URL to an OpenAI-compatible API that has it."
            )

    @classmethod
    def from_settings(cls, settings: Settings, *, model: str | None = None) -> Self:
        """`model`: in place of that of the settings."""
        name = model or settings.llm_model
        return cls(
            model=name,
            fallback_models=settings.llm_fallback_models if name == settings.llm_model else (),
            url=settings.llm_url,
            api_key=settings.llm_api_key,
            prices={} if settings.llm_prices is None else read_prices(settings.llm_prices),
            timeout_sec=settings.llm_timeout_sec,
        )


def is_installed() -> bool:
    return find_spec("pydantic_ai") is not None


def check_installed(what: str) -> None:
    """Raise SettingsError if the extra is missing; `what` needs it."""
    if not is_installed():
        raise SettingsError(f"{what} needs an extra: {INSTALL}.")


def read_prices(path: Path) -> dict[str, Price]:
    """Read the operator's prices: MODEL: {input: USD, output: USD, cached_input: USD}, per million tokens."""
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=dict[str, Price])
    except OSError as error:
        reason = error.strerror or type(error).__name__
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        reason = str(error)
    raise SettingsError(
        f"LINESHAFT_LLM_PRICES names {path}, which can't be used: {reason}. It must map names of models to "
        "prices in US dollars per million tokens, as in  gpt-5-mini: {input: 0.25, output: 2}."
    )
