"""A model behind an OpenAI-compatible API that isn't OpenAI's: its responses may say what they cost."""

from typing import Any

from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIStreamedResponse


class EndpointModel(OpenAIChatModel):
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
    cost = None if response.usage is None else getattr(response.usage, "cost", None)
    return {} if cost is None else {"cost": cost}
