"""A model behind an OpenAI-compatible API that isn't OpenAI's.

Such APIs leave out fields that few programs read (`id`, `object`, `total_tokens`), and may say what a call
cost (`usage.cost`).
"""

import contextlib
from typing import Any

import msgspec
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.messages import ModelResponse
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIStreamedResponse


class EndpointModel(OpenAIChatModel):
    def _process_response(self, response: ChatCompletion | str, **options: Any) -> ModelResponse:
        if isinstance(response, str):  # it came without the Content-Type of JSON
            with contextlib.suppress(msgspec.DecodeError, TypeError):
                response = ChatCompletion.model_construct(None, **msgspec.json.decode(response))
        if isinstance(response, ChatCompletion) and response.choices == []:
            raise UnexpectedModelBehavior("Invalid response: it has no choices")
        return super()._process_response(response, **options)

    def _validate_completion(self, response: ChatCompletion) -> Any:
        return super()._validate_completion(_completed(response, self.model_name))

    def _process_provider_details(self, response: ChatCompletion) -> dict[str, Any] | None:
        return {**(super()._process_provider_details(response) or {}), **_cost(response)} or None

    @property
    def _streamed_response_cls(self) -> type[OpenAIStreamedResponse]:
        return _EndpointStream


class _EndpointStream(OpenAIStreamedResponse):
    def _map_chunk_provider_details(self, chunk: ChatCompletionChunk) -> dict[str, Any] | None:
        return {**(super()._map_chunk_provider_details(chunk) or {}), **_cost(chunk)} or None


def _cost(response: ChatCompletion | ChatCompletionChunk) -> dict[str, Any]:
    """`usage.cost`, as OpenRouter and others report it."""
    cost = getattr(response.usage, "cost", None)
    return {} if cost is None else {"cost": cost}


def _completed(response: ChatCompletion, model: str) -> ChatCompletion:
    """A response with the fields that the protocol wants and this program doesn't need."""
    response.id, response.object = response.id or "", "chat.completion"
    response.model = response.model or model
    for number, choice in enumerate(response.choices or ()):
        choice.index = number
        if choice.message is not None:
            choice.message.role = "assistant"
    response.usage = _usage(response.usage)
    return response


def _usage(usage: Any) -> Any:
    """None if it says neither tokens nor cost: what isn't known must not count as nothing."""
    tokens = [getattr(usage, name, None) for name in ("prompt_tokens", "completion_tokens")]
    counted = [count for count in tokens if isinstance(count, int) and count >= 0]
    if len(counted) < len(tokens):
        if getattr(usage, "cost", None) is None:
            return None
        counted = [0, 0]
    usage.prompt_tokens, usage.completion_tokens = counted
    usage.total_tokens = sum(counted)
    return usage
