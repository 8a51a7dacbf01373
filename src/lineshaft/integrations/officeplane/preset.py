"""The defaults of document 003: retries after 5, 25 and 125 s, and 300 s for an attempt.

003 knows neither poison pills nor breakers: with two agents a task would end before its fourth attempt, and a
task behind a breaker would be QUEUED without a reason that its users know.
"""

from lineshaft.model.presets import Preset
from lineshaft.model.retry import RetryPolicy

OFFICEPLANE = Preset(
    name="officeplane",
    retry=RetryPolicy(initial_delay_sec=5.0, backoff_multiplier=5.0, max_delay_sec=None, jitter=False),
    max_attempts=4,
    boost_per_minute=0.0,
    max_duration_sec=300.0,
    ends_poison_pills=False,
    counts_for_breakers=False,
)
