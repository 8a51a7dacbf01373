"""When to try the short way first: statements that do the simple cases with less work (sql/shortcuts.sql)."""

#: So many times the long way is taken at once after the short one led nowhere, and twice as often each time
#: it does so again: a fleet whose tasks have locks, money or DAGs should not pay for both ways, and one that
#: has changed should be found out.
_FIRST, _LONGEST = 25, 1_600


class FastPath:
    def __init__(self) -> None:
        #: By who asks: how often to leave it still, and how often in all.
        self._detours: dict[str, tuple[int, int]] = {}

    def is_open(self, who: str = "") -> bool:
        left, whole = self._detours.get(who, (0, 0))
        if left:
            self._detours[who] = left - 1, whole
        return not left

    def tried(self, who: str = "", *, worked: bool) -> None:
        if worked:
            self._detours.pop(who, None)
        else:
            whole = min(2 * self._detours[who][1], _LONGEST) if who in self._detours else _FIRST
            self._detours[who] = whole, whole
