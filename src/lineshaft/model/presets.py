"""Presets: named sets of defaults for what a new task leaves out.

The model has one, `factory`. Integrations have others, as data, and `register` them. The model finds every
preset by its name.
"""

from msgspec import Struct

from lineshaft.model.retry import RetryPolicy


class Preset(Struct, frozen=True, kw_only=True):
    name: str
    retry: RetryPolicy
    max_attempts: int
    boost_per_minute: float
    #: None: the default of the installation.
    max_duration_sec: float | None = None
    require_decision_report: bool = False
    #: A poison pill ends a task; without it, the flag is only shown, and the task uses up its attempts.
    ends_poison_pills: bool = True
    #: Failures count against the breaker of the type; without it, only where one is configured for the type.
    counts_for_breakers: bool = True


FACTORY = Preset(name="factory", retry=RetryPolicy(), max_attempts=3, boost_per_minute=0.1)

_presets = {FACTORY.name: FACTORY}


def register(preset: Preset) -> None:
    """Make a preset known; a name has one meaning as long as the process lives."""
    if _presets.setdefault(preset.name, preset) != preset:
        raise ValueError(f"There is another preset with the name {preset.name!r}. Choose another name.")


def preset_names() -> tuple[str, ...]:
    return tuple(_presets)


def preset_named(name: str) -> Preset:
    """The preset of a task; `factory` for a name that only a newer version of Lineshaft knows."""
    return _presets.get(name, FACTORY)
