"""When to try the short way first: statements that do the simple cases with less work (sql/shortcuts.sql)."""

#: So many times the long way is taken at once after the short one led nowhere: a fleet whose tasks have
#: locks, money or DAGs should not pay for both each time, and one that has changed should be found out.
_DETOUR = 25


class Shortcut:
    def __init__(self) -> None:
        #: By who asks: how often to leave it.
        self._detours: dict[str, int] = {}

    def is_open(self, who: str = "") -> bool:
        left = self._detours.get(who, 0)
        if left:
            self._detours[who] = left - 1
        return not left

    def tried(self, who: str = "", *, worked: bool) -> None:
        if not worked:
            self._detours[who] = _DETOUR
        elif who in self._detours:
            del self._detours[who]
