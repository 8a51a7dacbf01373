"""Webhooks: deliveries of other systems, authenticated by their signature."""

import os
from datetime import UTC, datetime

import structlog
from msgspec import UNSET, Struct, UnsetType

from lineshaft.engine.sources.firing import Key, Occasion, SourceRow
from lineshaft.errors import InvalidInputError, PayloadTooLargeError, UnauthorizedError
from lineshaft.operations.operation import operation
from lineshaft.operations.sources import ByName
from lineshaft.server.framework import limits
from lineshaft.server.framework.routing import Answer, read_body
from lineshaft.server.service import Call
from lineshaft.sources import deliveries
from lineshaft.sources.signatures import SignatureError, verify
from lineshaft.types import Fired, FiringOutcome, SourceKind, Verification

_log = structlog.get_logger("lineshaft.hooks")

PREFIX = "/hooks/"


class HookAnswer(Struct, frozen=True):
    outcome: FiringOutcome
    task_ids: list[str]
    dag_id: str | None


class Acknowledgement(Struct, frozen=True, kw_only=True):
    """The response to a test of the connection, or to a slash command."""

    outcome: FiringOutcome | UnsetType = UNSET
    task_ids: list[str] | UnsetType = UNSET
    dag_id: str | UnsetType | None = UNSET
    #: Slack's, returned as it came.
    challenge: str | UnsetType = UNSET
    #: For the person who typed a slash command.
    response_type: str | UnsetType = UNSET
    text: str | UnsetType = UNSET


@operation(
    "POST /hooks/{name}",
    None,
    response={202: HookAnswer, 200: Acknowledgement},
    reads_body=True,
    codes=("unauthorized", "payload_too_large", "invalid_input"),
)
async def deliver_webhook(call: Call, request: ByName) -> Answer:
    """Deliver an event to a webhook source.

    The signature authenticates the call, so it needs no token. A repeated delivery creates nothing. GitHub's
    `ping`, Slack's `url_verification` and Slack's slash commands are answered with 200.
    """
    name = request.name
    body = await _body(call)
    row = await call.service.engine.firings.look_up(name)
    if row is None or row.kind != SourceKind.WEBHOOK or not row.is_enabled:
        _log.warning("Webhook refused", source=name, reason="unknown or disabled source")
        raise _refused(name)
    headers = {header.lower(): value for header, value in call.headers.items()}
    source = row.compiled.source
    how = source.verify
    assert isinstance(how, Verification)  # noqa: S101 - a webhook has one
    _authenticate(call, row, how, headers, body)
    try:
        limits.check_structure(body)
        delivery = deliveries.read(how, headers, body, replay_window_sec=source.replay_window_sec or 0.0)
    except InvalidInputError as error:
        _log.warning("Webhook refused", source=name, reason=str(error))
        raise
    if delivery.challenge is not None:
        return Answer(Acknowledgement(challenge=delivery.challenge))
    firings = call.service.engine.firings
    if delivery.is_ping:
        return _answer(await firings.note(name, FiringOutcome.FILTERED, "GitHub's ping"), 200)
    keys = [Key(text, ttl) for text, ttl in delivery.keys]
    fired = await firings.fire(name, Occasion(delivery.event, keys), unless_disabled=True)
    return _command_answer(fired) if delivery.is_command else _answer(fired, 202)


async def _body(call: Call) -> bytes:
    try:
        return await read_body(call.receive, deliveries.MAX_BODY_BYTES)
    except PayloadTooLargeError:
        raise PayloadTooLargeError(
            f"The body is larger than {deliveries.MAX_BODY_BYTES} bytes, the limit of a webhook."
        ) from None


def _authenticate(
    call: Call, row: SourceRow, how: Verification, headers: dict[str, str], body: bytes
) -> None:
    secret = os.environ.get(how.secret_env or "", "")
    if how.scheme != "none" and not secret:
        _log.error("Webhook refused", source=row.name, reason=f"the variable {how.secret_env} is not set")
        raise _refused(row.name)
    now = call.service.engine.database.now["now"] or datetime.now(UTC)
    try:
        verify(how, secret, headers, body, now.timestamp())
    except SignatureError as error:
        _log.warning("Webhook refused", source=row.name, scheme=how.scheme, reason=str(error))
        raise _refused(row.name) from None


def _refused(name: str) -> UnauthorizedError:
    """The same for unknown names, wrong signatures and a missing secret: no stranger finds webhooks out."""
    return UnauthorizedError(
        f"The delivery to {name!r} was refused: no enabled webhook has this name, or the delivery isn't "
        "signed with its secret. The server's log says which."
    )


_TEXTS = {
    FiringOutcome.CREATED: "On it: {ids}",
    FiringOutcome.DUPLICATE: "This was submitted before.",
    FiringOutcome.FILTERED: "There is nothing to do for this command.",
    FiringOutcome.SKIPPED: "There is too much open work; try again later.",
    FiringOutcome.FAILED: "This could not be submitted; the operator can see why.",
}


def _command_answer(fired: Fired) -> Answer:
    """Slack shows the text to the person, and takes any status but 200 for a failure."""
    answer = _answer(fired, 200).value
    text = _TEXTS[answer.outcome].format(ids=answer.dag_id or " ".join(answer.task_ids))
    shown = Acknowledgement(
        outcome=answer.outcome,
        task_ids=answer.task_ids,
        dag_id=answer.dag_id,
        response_type="ephemeral",
        text=text,
    )
    return Answer(shown)


def _answer(fired: Fired, status: int) -> Answer:
    ids = fired.task_ids if isinstance(fired.task_ids, list) else []
    dag_id = fired.dag_id if isinstance(fired.dag_id, str) else None
    return Answer(HookAnswer(FiringOutcome(str(fired.outcome)), ids, dag_id), status)
