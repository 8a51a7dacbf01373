"""`LLMClient`: asks models, and makes models for agents of pydantic-ai."""

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from decimal import Decimal
from typing import Any, Self

import msgspec
from msgspec import Struct
from pydantic_ai.direct import model_request
from pydantic_ai.exceptions import AgentRunError, FallbackExceptionGroup, ModelAPIError, UserError
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, UserPromptPart
from pydantic_ai.models import Model, ModelRequestParameters, StreamedResponse, infer_model
from pydantic_ai.models.fallback import FallbackModel
from pydantic_ai.models.wrapper import WrapperModel
from pydantic_ai.providers import Provider, infer_provider, infer_provider_class
from pydantic_ai.settings import ModelSettings, merge_model_settings
from pydantic_ai.tools import RunContext

from lineshaft.errors import SettingsError
from lineshaft.integrations.llm.configuration import LLMConfig
from lineshaft.integrations.llm.errors import LLMAnswerError, LLMError
from lineshaft.integrations.llm.prices import cost_of
from lineshaft.integrations.llm.secrets import without_secrets
from lineshaft.integrations.llm.translation import translated
from lineshaft.settings import Settings


class Answer(Struct, frozen=True):
    """What a model answered, and what that cost."""

    #: With a schema the JSON value, otherwise the text.
    value: Any
    text: str
    model: str
    #: None: unknown.
    cost_usd: Decimal | None
    tokens_input: int = 0
    tokens_output: int = 0


class LLMClient:
    """The models of one configuration. It may be used by any number of tasks at the same time."""

    def __init__(self, config: LLMConfig) -> None:
        self.config = config
        self._models: dict[tuple[str, ...], Model] = {}

    def __repr__(self) -> str:
        return f"<LLMClient {self.config.model}>"

    @classmethod
    def from_settings(cls, settings: Settings | None = None, *, model: str | None = None) -> Self:
        """With LINESHAFT_LLM_MODEL and the rest of the settings; `model` in place of that one."""
        return cls(LLMConfig.from_settings(settings or Settings.load(), model=model))

    def model(self, name: str | None = None, *, fallback_models: Sequence[str] | None = None) -> Model:
        """A model for an agent of pydantic-ai; raises SettingsError if it can't be used here.

        By default it is the configured model with its fallback models. A model that is named has no other
        fallback models than those that are named with it.
        """
        if fallback_models is None:
            fallback_models = self.config.fallback_models if name in (None, self.config.model) else ()
        names = tuple(dict.fromkeys((self.config.named(name), *fallback_models)))
        if names not in self._models:
            each = [self._single(one) for one in names]
            inner = each[0] if len(each) == 1 else FallbackModel(each[0], *each[1:])
            self._models[names] = _TranslatingModel(inner, self)
        return self._models[names]

    def cost(self, response: ModelResponse, *, asked: str | None = None) -> Decimal | None:
        """What a response cost in US dollars; None: unknown. `asked`: the model's name in the request."""
        return cost_of(response, self.config.prices, asked)

    def translated(self, error: BaseException) -> LLMError | None:
        """An error of pydantic-ai as an LLMError; None: it isn't about the call of a model."""
        return translated(error, (self.config.api_key,))

    async def ask(
        self,
        prompt: str,
        *,
        instructions: str = "",
        schema: Mapping[str, Any] | None = None,
        model: str | None = None,
        temperature: float | None = None,
    ) -> Answer:
        """Ask one question. With a JSON schema the answer's value is JSON; the caller checks whether it fits.

        Raises LLMError. An answer without JSON raises LLMAnswerError, which has the text and the cost.
        """
        chosen = self.model(model)
        settings = chosen.settings or ModelSettings()
        if temperature is not None:
            settings["temperature"] = temperature
        if schema is not None:
            form = msgspec.json.encode(schema).decode()
            rule = f"Answer with one JSON value that fits this JSON schema, and with nothing else:\n{form}"
            instructions = f"{instructions}\n\n{rule}" if instructions else rule
        question = ModelRequest(parts=[UserPromptPart(prompt)], instructions=instructions or None)
        # The mode only asks for JSON from APIs that can guarantee it, which is always an object.
        is_object = schema is not None and schema.get("type") == "object"
        parameters = ModelRequestParameters(output_mode="prompted" if is_object else "text")
        try:
            async with chosen:
                response = await model_request(
                    chosen, [question], model_settings=settings, model_request_parameters=parameters
                )
        except ModelAPIError as error:  # its deadline, which pydantic-ai keeps outside of the model
            raise self.translated(error) or error from None
        text = response.text or ""
        cost = self.cost(response, asked=model or self.config.model)
        value = text if schema is None else self._json(text, response, cost)
        used = response.usage
        return Answer(
            value, text, response.model_name or chosen.model_name, cost, used.input_tokens, used.output_tokens
        )

    def _json(self, text: str, response: ModelResponse, cost: Decimal | None) -> Any:
        try:
            return json_in(text)
        except ValueError as error:
            cut = (
                ", because it was cut off at its greatest length"
                if response.finish_reason == "length"
                else ""
            )
            raise LLMAnswerError(
                f"The answer of {response.model_name} has no JSON{cut}: {error}", cost_usd=cost, answer=text
            ) from None

    def _single(self, name: str) -> Model:
        self.config.check(name)
        provider = name.partition(":")[0] if ":" in name else None
        if self.config.url is not None and (provider is None or not _is_provider(provider)):
            return self._at_url(name, self.config.url)
        try:
            return infer_model(name, _provider)
        except (UserError, ValueError) as error:
            fault = without_secrets(str(error).partition(" To try ")[0], (self.config.api_key,))
            raise SettingsError(f"The model {name!r} can't be used: {fault}") from None
        except ImportError:
            raise SettingsError(
                f"The model {name!r} needs a package: pip install 'pydantic-ai-slim[{provider}]'."
            ) from None

    def _at_url(self, name: str, url: str) -> Model:
        from pydantic_ai.providers.openai_compatible import OpenAICompatibleProvider  # noqa: PLC0415

        from lineshaft.integrations.llm.endpoint import EndpointModel  # noqa: PLC0415

        provider = OpenAICompatibleProvider("endpoint", base_url=url, api_key=self.config.api_key or "none")
        # Those of OpenAI itself, in variables of this process, are not for others.
        provider.client.organization = provider.client.project = None
        return EndpointModel(name, provider=_without_retries(provider))


class _TranslatingModel(WrapperModel):
    """A model whose errors are ours, and whose responses have their cost."""

    def __init__(self, wrapped: Model, client: LLMClient) -> None:
        super().__init__(wrapped)
        self._client = client

    @property
    def settings(self) -> ModelSettings | None:
        # The keys of one call count before these.
        return merge_model_settings(
            ModelSettings(request_timeout=self._client.config.timeout_sec),
            self.wrapped.settings,
        )

    async def request(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
    ) -> ModelResponse:
        try:
            response = await super().request(messages, model_settings, model_request_parameters)
        except (AgentRunError, FallbackExceptionGroup) as error:
            raise self._client.translated(error) or error from None
        response.usage.cost = self._client.cost(response, asked=self.wrapped.model_name)
        return response

    @asynccontextmanager
    async def request_stream(
        self,
        messages: list[ModelMessage],
        model_settings: ModelSettings | None,
        model_request_parameters: ModelRequestParameters,
        run_context: RunContext[Any] | None = None,
    ) -> AsyncIterator[StreamedResponse]:
        try:
            async with super().request_stream(
                messages, model_settings, model_request_parameters, run_context
            ) as stream:
                yield stream
        except (AgentRunError, FallbackExceptionGroup) as error:
            raise self._client.translated(error) or error from None


def json_in(text: str) -> Any:
    """The JSON value of a text; some models put it in a code block, or words around it. Raises ValueError."""
    for candidate in (text, *(text[start:end] for start, end in _brackets(text))):
        try:
            return msgspec.json.decode(candidate)
        except msgspec.DecodeError:
            continue
    raise ValueError(f"{text[:200]!r}" if text.strip() else "it is empty")


def _brackets(text: str) -> list[tuple[int, int]]:
    """Where an object or a list may be, the outermost first."""
    places = [(text.find(begin), text.rfind(end) + 1) for begin, end in ("{}", "[]")]
    return sorted((start, end) for start, end in places if 0 <= start < end)


def _provider(name: str) -> Provider[Any]:
    return _without_retries(infer_provider(name))


def _without_retries(provider: Provider[Any]) -> Provider[Any]:
    """A repeated call is the queue's decision, which knows when and whether there is money for it."""
    if hasattr(provider.client, "max_retries"):
        provider.client.max_retries = 0
    return provider


_PROVIDER = re.compile(r"[a-z][a-z0-9/_-]*")


def _is_provider(name: str) -> bool:
    """Whether it is a provider of pydantic-ai, and not a part of a name such as llama3.2:3b."""
    if not _PROVIDER.fullmatch(name):
        return False
    try:
        infer_provider_class(name)
    except ValueError:
        return False
    except ImportError:
        return True
    return True
