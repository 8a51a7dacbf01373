"""Signatures, with the examples of the providers' own documentation."""

import hashlib
import hmac
from collections.abc import Mapping
from typing import Any

import pytest

from lineshaft.errors import InvalidInputError
from lineshaft.sources import deliveries
from lineshaft.sources.signatures import SignatureError, verify
from lineshaft.types.sources import Verification

#: GitHub, "Validating webhook deliveries".
GITHUB = (
    "github",
    "It's a Secret to Everybody",
    {"x-hub-signature-256": "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"},
    b"Hello, World!",
    0.0,
)
SLACK_BODY = (
    b"token=xyzz0WbapA4vBCDEFasx0q6G&team_id=T1DC2JH3J&team_domain=testteamnow&channel_id=G8PSS9T3V"
    b"&channel_name=foobar&user_id=U2CERLKJA&user_name=roadrunner&command=%2Fwebhook-collect&text="
    b"&response_url=https%3A%2F%2Fhooks.slack.com%2Fcommands%2FT1DC2JH3J%2F397700885554"
    b"%2F96rGlfmibIGlgcZRskXaIFfN&trigger_id=398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c"
)
#: Slack, "Verifying requests from Slack".
SLACK = (
    "slack",
    "8f742231b10e8888abcd99yyyzzz85a5",
    {
        "x-slack-signature": "v0=a2114d57b48eac39b9ad189dd8316235a7b4a8d21a10bd27519666489c69b503",
        "x-slack-request-timestamp": "1531420618",
    },
    SLACK_BODY,
    1531420618.0,
)
#: Standard Webhooks, the example of the specification.
STANDARD = (
    "standard",
    "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw",
    {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    },
    b'{"test": 2432232314}',
    1614265330.0,
)
HMAC = (
    "hmac-sha256",
    "key",
    # RFC 4231 has binary keys; this is the well-known example of HMAC_SHA256 with the key "key".
    {"x-signature-256": "f7bc83f430538424b13298e6aa6fb143ef4d59a14946175997479dbc2d1a3cd8"},
    b"The quick brown fox jumps over the lazy dog",
    0.0,
)
GITLAB = ("gitlab", "s3cret", {"x-gitlab-token": "s3cret"}, b"{}", 0.0)
TOKEN = ("token", "s3cret", {"authorization": "Bearer s3cret"}, b"{}", 0.0)
CASES = [GITHUB, SLACK, STANDARD, HMAC, GITLAB, TOKEN]
Case = tuple[str, str, Mapping[str, str], bytes, float]


def how(scheme: Any, **more: Any) -> Verification:
    return Verification(scheme=scheme, secret_env="X", **more)


def check(case: Case, **other: Any) -> None:
    scheme, secret, headers, body, now = case
    given: dict[str, Any] = {"secret": secret, "headers": headers, "body": body, "now": now, **other}
    verify(how(scheme), given["secret"], given["headers"], given["body"], given["now"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_the_documented_example_is_authentic(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", [GITHUB, SLACK, STANDARD, HMAC], ids=lambda case: case[0])
def test_every_changed_byte_is_noticed(case: Case) -> None:
    body = case[3]
    for place in {0, len(body) // 2, len(body) - 1}:
        changed = body[:place] + bytes([body[place] ^ 1]) + body[place + 1 :]
        with pytest.raises(SignatureError, match="doesn't match"):
            check(case, body=changed)
    with pytest.raises(SignatureError):
        check(case, body=body + b" ")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_a_wrong_or_missing_secret_or_header_is_refused_without_showing_the_secret(case: Case) -> None:
    wrong = "whsec_AAAA" if case[0] == "standard" else "another"
    others: list[dict[str, Any]] = [{"secret": wrong}, {"secret": ""}, {"headers": {}}]
    for other in others:
        with pytest.raises(SignatureError) as refused:
            check(case, **other)
        assert case[1] not in str(refused.value)
    for name in case[2]:
        for value in ("", "é", "sha256=", "v0=", "v1,", "Bearer "):
            with pytest.raises(SignatureError):
                check(case, headers={**case[2], name: value})


@pytest.mark.parametrize("case", [SLACK, STANDARD], ids=lambda case: case[0])
def test_a_time_stamp_is_good_for_five_minutes(case: Case) -> None:
    now = case[4]
    check(case, now=now + 300)
    check(case, now=now - 300)
    for later in (now + 301, now - 301):
        with pytest.raises(SignatureError, match="more than 300 s from now"):
            check(case, now=later)


def test_one_of_several_signatures_is_enough() -> None:
    headers = dict(STANDARD[2])
    headers["webhook-signature"] = f"v1,AAAA v2,zzz {headers['webhook-signature']}"
    check(STANDARD, headers=headers)


def test_a_header_of_its_own() -> None:
    signature = hmac.new(b"key", b"body", hashlib.sha256).hexdigest()
    verify(how("hmac-sha256", header="X-My-Mac"), "key", {"x-my-mac": f"sha256={signature}"}, b"body", 0)
    verify(how("token", header="X-My-Token"), "key", {"x-my-token": "key"}, b"body", 0)
    with pytest.raises(SignatureError, match="x-my-mac is missing"):
        verify(how("hmac-sha256", header="X-My-Mac"), "key", {"x-signature-256": signature}, b"body", 0)


def test_the_event_is_the_body_with_headers_but_without_secrets() -> None:
    headers = {
        "content-type": "application/json",
        "x-github-event": "push",
        "x-github-delivery": "d1",
        "authorization": "Bearer hidden",
        "cookie": "hidden",
        "x-gitlab-token": "hidden",
        "x-hub-signature-256": "hidden",
        "x-api-key": "hidden",
    }
    delivery = deliveries.read(how("github"), headers, b'{"ref": "main", "headers": 1}')

    assert delivery.event["ref"] == "main"
    assert delivery.event["body"] == {"ref": "main", "headers": 1}
    assert delivery.event["headers"] == {
        "content-type": "application/json",
        "x-github-event": "push",
        "x-github-delivery": "d1",
    }
    assert [key.partition(":")[0] for key, _ in delivery.keys] == ["delivery"]


def test_forms_and_other_bodies() -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    slack = deliveries.read(how("slack"), form, SLACK[3])
    assert (slack.event["command"], "token" in slack.event) == ("/webhook-collect", False)
    assert slack.keys == [
        ("delivery:398738663015.47445629121.803a0bc887a14d10d2c447fce8b6703c", 30 * 86_400.0)
    ]
    assert deliveries.read(how("github"), form, b"payload=%7B%22a%22%3A1%7D").event["a"] == 1
    assert deliveries.read(how("token"), {"content-type": "text/plain"}, b"hi").event["body"] == "hi"
    assert deliveries.read(how("token"), {}, b"").event["body"] == {}
    assert deliveries.read(how("token"), {}, b"[1]").event["body"] == [1]
    for body in (b"{", b"\xff", b"nope"):
        with pytest.raises(InvalidInputError, match="not valid JSON"):
            deliveries.read(how("token"), {}, body)
