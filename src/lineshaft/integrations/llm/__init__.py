"""Calls of language models: the only place of Lineshaft that makes them, through pydantic-ai.

    client = LLMClient.from_settings()
    answer = await client.ask("Name three colours.", schema={"type": "array"})
    answer.value, answer.cost_usd

`LLMClient` (`client.py`) is what others use: `ask` for one question, `model` for an agent of pydantic-ai,
`cost` for the price of a response. Every call made through it fails as an `LLMError` (`errors.py`), which
says of which category the failure is, when to try again, and what was spent. Clients of providers don't
retry: retries are the queue's. No message contains a key (`secrets.py`).

This room needs the extra `llm`, which is imported when a model is needed first: only `errors.py` and
`configuration.py` work without it. It knows neither tasks nor the database.
"""
