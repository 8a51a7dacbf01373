"""Django: submission as part of a transaction or after it, and a management command that runs agents.

    INSTALLED_APPS = [..., "lineshaft.integrations.django"]

    with transaction.atomic():
        order.save()
        submit(mail.new(order=order.id))

See docs/transactional-submit.md.
"""

from lineshaft.integrations.django.submission import (
    asubmit,
    close,
    open_shaft,
    submit,
    submit_dag,
    submit_many,
    submit_on_commit,
)

__all__ = ["asubmit", "close", "open_shaft", "submit", "submit_dag", "submit_many", "submit_on_commit"]
