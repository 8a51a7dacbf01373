"""The defaults of document 000: 60 s, doubled up to an hour; a completion explains itself."""

from lineshaft.model.presets import Preset
from lineshaft.model.retry import RetryPolicy

LOKI = Preset(
    name="loki",
    retry=RetryPolicy(initial_delay_sec=60.0, max_delay_sec=3_600.0, jitter=False),
    max_attempts=3,
    boost_per_minute=0.0,
    require_decision_report=True,
)
