"""Tokens of the HTTP API."""

from lineshaft.server.framework.routing import Answer, Routes
from lineshaft.server.routes import requests
from lineshaft.server.service import Call
from lineshaft.types import NewToken, Page, Scope, Token

routes = Routes()


@routes.get("/v1/tokens", Scope.ADMIN, Page[Token])
async def list_tokens(call: Call) -> Answer:
    """List all tokens, including revoked ones, oldest first. Secrets are never shown."""
    return Answer(Page(await call.service.tokens.all()))


@routes.post("/v1/tokens", Scope.ADMIN, {201: NewToken}, example={"name": "ci", "scope": "submit"})
async def create_token(call: Call, body: requests.CreateToken) -> Answer:
    """Create a token. Its secret is in this response only.

    Once a token has been created every call needs one, on loopback too, also after all were revoked.
    A token with the scope `agent` may be bound to one agent by `agent_id`: it registers, claims and works
    only as that agent. `budget_usd` is then the agent's budget, whatever it declares when it registers.
    """
    made = await call.service.tokens.create(
        body.name, body.scope, agent_id=body.agent_id, budget_usd=body.budget_usd
    )
    call.service.notice_token()
    return Answer(made, 201)


@routes.delete("/v1/tokens/{id:path}", Scope.ADMIN, codes=("not_found",))
async def revoke_token(call: Call) -> Answer:
    """Revoke a token by id, or every token with this name; servers reject it from the next request on."""
    await call.service.tokens.revoke(call.path["id"])
    return Answer(status=204)
