"""The environment of programs that handle the work of others: what they need, and what is passed by name."""

from collections.abc import Collection, Mapping

#: Where programs are, whose account it is, and how to write texts and times.
ALLOWED = frozenset({"PATH", "HOME", "LANG", "TZ", "TMPDIR", "TERM"})
_ALLOWED_PREFIX = "LC_"


def child_environment(own: Mapping[str, str], passed: Collection[str] = ()) -> dict[str, str]:
    """The allowed variables of this process, and those that were passed by name."""
    return {
        name: value
        for name, value in own.items()
        if name in ALLOWED or name.startswith(_ALLOWED_PREFIX) or name in passed
    }
