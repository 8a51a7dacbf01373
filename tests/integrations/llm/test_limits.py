"""Until when a provider asks to wait."""

from datetime import UTC, datetime, timedelta

import pytest

from lineshaft.integrations.llm.limits import wait_until

NOW = datetime(2026, 11, 19, 16, 30, tzinfo=UTC)


def at(text: str) -> datetime:
    return datetime.fromisoformat(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("usage limit reached; resets at 2026-11-19T21:00:00Z", at("2026-11-19T21:00:00Z")),
        ("Limit resets at 2026-11-19 21:00:00 UTC", at("2026-11-19T21:00:00Z")),
        ("resets at 2026-11-19T22:00:00+01:00.", at("2026-11-19T21:00:00Z")),
        ('{"reset_at": "2026-11-19T21:00:00.250Z"}', at("2026-11-19T21:00:00.250Z")),
        ("Claude AI usage limit reached, resets at 1795129200", datetime.fromtimestamp(1795129200, UTC)),
        ("try again at 1795129200000", datetime.fromtimestamp(1795129200, UTC)),
        ("5-hour limit reached ∙ resets 9pm", at("2026-11-19T21:00:00Z")),
        ("resets at 9:15am (UTC)", at("2026-11-20T09:15:00Z")),
        ("resets at 21:00 (Europe/Berlin)", at("2026-11-19T20:00:00Z")),
        ("resets 12am", at("2026-11-20T00:00:00Z")),
        ("resets in 4h 12m", NOW + timedelta(hours=4, minutes=12)),
        ("resets in 2 days", NOW + timedelta(days=2)),
        ("resets in 90 seconds", NOW + timedelta(seconds=90)),
        ("Please try again in 20s.", None),  # the engine finds it by itself
        ("resets at 25:99", None),
        ("resets at 13pm", None),
        ("resets at 2026-13-45T00:00:00Z", None),
        ("resets at 21:00 (Mars/Olympus)", None),
        ("item 3 resets at 4 places", None),
        ("try again at 9999999999", None),
        ("", None),
    ],
)
def test_texts(text: str, expected: datetime | None) -> None:
    assert wait_until({}, text, NOW) == expected


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"retry-after": "7"}, NOW + timedelta(seconds=7)),
        ({"retry-after": "Thu, 19 Nov 2026 21:00:00 GMT"}, at("2026-11-19T21:00:00Z")),
        ({"retry-after-ms": "1500", "retry-after": "2"}, NOW + timedelta(milliseconds=1_500)),
        (
            {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "6m0s"},
            NOW + timedelta(minutes=6),
        ),
        (
            {"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "120ms"},
            NOW + timedelta(milliseconds=120),
        ),
        # A window that isn't used up says nothing.
        ({"x-ratelimit-remaining-tokens": "5", "x-ratelimit-reset-tokens": "6m0s"}, None),
        (
            {
                "anthropic-ratelimit-input-tokens-remaining": "0",
                "anthropic-ratelimit-input-tokens-reset": "2026-11-19T17:00:00Z",
                "retry-after": "60",
            },
            at("2026-11-19T17:00:00Z"),
        ),
        ({"anthropic-ratelimit-unified-reset": "1795129200"}, datetime.fromtimestamp(1795129200, UTC)),
        ({"retry-after": "soon"}, None),
        ({"retry-after": ""}, None),
        ({}, None),
    ],
)
def test_headers(headers: dict[str, str], expected: datetime | None) -> None:
    assert wait_until(headers, "", NOW) == expected


def test_the_latest_instant_counts() -> None:
    """A call may only succeed when all limits allow it."""
    text = "resets at 2026-11-19T21:00:00Z"
    assert wait_until({"retry-after": "5"}, text, NOW) == at("2026-11-19T21:00:00Z")
