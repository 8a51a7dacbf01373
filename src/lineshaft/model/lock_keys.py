"""Names of document locks."""

#: The lock of document X is `doc:X`; other names are free for anything that must run one at a time.
DOCUMENT_PREFIX = "doc:"


def document_of(lock_key: str | None) -> str | None:
    """The id of the document; None: the task locks none."""
    if lock_key is None or not lock_key.startswith(DOCUMENT_PREFIX):
        return None
    return lock_key.removeprefix(DOCUMENT_PREFIX)
