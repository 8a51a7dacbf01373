"""Tokens of the HTTP API."""

from decimal import Decimal

from lineshaft.operations.operation import Engine, operation
from lineshaft.types import NewToken, Page, Scope, Token
from lineshaft.types.request import ById, Nothing, Request


@operation("GET /v1/tokens", Scope.ADMIN)
async def list_tokens(engine: Engine, request: Nothing) -> Page[Token]:  # noqa: ARG001 - it has no fields
    """List all tokens, including revoked ones, oldest first. Secrets are never shown."""
    return Page(await engine.tokens.all())


class CreateToken(Request, frozen=True, kw_only=True):
    name: str
    #: read, submit, agent, operate or admin.
    scope: str
    #: The only agent that it may act as, with the scope `agent`; null: any.
    agent_id: str | None = None
    #: The budget of that agent, in place of what it declares when it registers.
    budget_usd: Decimal | float | None = None


@operation("POST /v1/tokens", Scope.ADMIN, created=True, example={"name": "ci", "scope": "submit"})
async def create_token(engine: Engine, request: CreateToken) -> NewToken:
    """Create a token. Its secret is in this response only.

    Once a token has been created every call needs one, on loopback too, also after all were revoked.
    A token with the scope `agent` may be bound to one agent by `agent_id`: it registers, claims and works
    only as that agent. `budget_usd` is then the agent's budget, whatever it declares when it registers.
    """
    return await engine.tokens.create(
        request.name, request.scope, agent_id=request.agent_id, budget_usd=request.budget_usd
    )


class RevokeToken(ById, frozen=True, kw_only=True):
    pause_sources: bool = False


@operation("DELETE /v1/tokens/{id:path}", Scope.ADMIN, codes=("not_found",))
async def revoke_token(engine: Engine, request: RevokeToken) -> None:
    """Revoke a token by id, or every token with this name; servers reject it from the next request on.

    Sources that a token bound to an agent has put are paused; those of other tokens go on, unless
    `pause_sources` is true. `GET /v1/tokens` lists the sources of each token.
    """
    await engine.tokens.revoke(request.id, pause_sources=request.pause_sources)
