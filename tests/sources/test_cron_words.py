"""Cron expressions in words."""

import pytest

from lineshaft.sources.cron_words import in_words


@pytest.mark.parametrize(
    ("cron", "words"),
    [
        ("* * * * *", "every minute"),
        ("*/5 * * * *", "every 5 minutes"),
        ("*/10 9-17 * * *", "every 10 minutes from 09:00 to 17:59"),
        ("@hourly", "every hour, on the hour"),
        ("0,30 * * * *", "every hour, at minute 0 and 30"),
        ("0 */6 * * *", "every 6 hours, on the hour"),
        ("15 9-17 * * 1-5", "every hour from 09:15 to 17:15 Monday to Friday"),
        ("@daily", "at 00:00 every day"),
        ("0 9,17 * * sat,sun", "at 09:00 and 17:00 on Sunday and Saturday"),
        ("0 9 * * 5-7", "at 09:00 Friday to Sunday"),
        ("@weekly", "at 00:00 on Sunday"),
        ("30 2 1,15 * *", "at 02:30 on day 1 and 15 of the month"),
        ("0 0 L * *", "at 00:00 on the last day of the month"),
        ("0 9 1 * MON", "at 09:00 on day 1 of the month or on Monday"),
        ("0 9 * JAN,JUL *", "at 09:00 every day in January and July"),
        ("0 9 * 3-5 *", "at 09:00 every day from March to May"),
        ("@yearly", "at 00:00 on day 1 of the month in January"),
    ],
)
def test_common_expressions(cron: str, words: str) -> None:
    assert in_words(cron) == words


@pytest.mark.parametrize(
    "cron",
    [
        *(
            "*/7 * * * *",
            "7/3 * * * *",
            "0 9 * * MON#1",
            "0 1-5,9 * * *",
            "0 0 31W * *",
            "* * * *",
            "",
            "@nope",
        ),
        *("0 99 * * *", "0 9 * 13 *", "0,1,2,3 1,2 * * *", "0 9 * * 5-1"),
    ],
)
def test_what_has_no_short_description_stays_an_expression(cron: str) -> None:
    assert in_words(cron) is None
