"""Bodies to try operations with, shown in the OpenAPI document."""

from typing import Any

TASK: dict[str, Any] = {
    "type": "research",
    "title": "Compare three competitors",
    "spec": {"prompt": "Compare the pricing pages of three competitors."},
    "priority": 40,
    "required_capabilities": ["web-search"],
    "max_cost_usd": 0.5,
    "tags": ["landing-page"],
}

DAG: dict[str, Any] = {
    "title": "Landing page",
    "budget_ceiling_usd": 5,
    "tasks": [
        {"key": "research", "type": "research", "spec": {"prompt": "Who else is there?"}},
        {"key": "design", "type": "design"},
        {"key": "implement", "type": "code", "depends_on": ["research", "design"]},
    ],
}

AGENT: dict[str, Any] = {
    "id": "coder-1",
    "type": "coder",
    "capabilities": ["python", "web-search"],
    "models_available": ["large", "small"],
    "version": "2.1",
    "max_concurrent_tasks": 2,
    "budget_usd": 45,
}

CLAIM_TOKEN = "AAAAAwAGR0hGIEAAH9z4okVFka5nn2zGlpKfeQMCbauh6e6GxtNws4oe4NQ"  # noqa: S105 - an example

COMPLETION: dict[str, Any] = {
    "claim_token": CLAIM_TOKEN,
    "output": {"data": {"answer": 42}},
    "cost_usd": 0.12,
    "tokens_used": {"input": 1200, "output": 350},
}
