"""Run by `manage.py test`, on a test database of Django's."""

from typing import Any
from unittest.mock import patch

from django.db import IntegrityError, connection, connections, transaction
from django.test import AsyncClient, TestCase, TransactionTestCase
from shop.agents import mail
from shop.models import Order

from lineshaft import NewTask
from lineshaft.errors import AlreadyExistsError, InvalidInputError, SettingsError
from lineshaft.integrations.django import (
    close,
    open_shaft,
    submit,
    submit_dag,
    submit_many,
    submit_on_commit,
)


def submitted() -> list[str]:
    """The titles of tasks that other connections can see."""
    tasks = open_shaft().list(limit=100).items
    # An open connection would keep Django from dropping the database.
    close()
    return sorted(task.title for task in tasks)


class Transactions(TransactionTestCase):
    def setUp(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute(
                "TRUNCATE lineshaft.task, lineshaft.task_live, lineshaft.task_end, lineshaft.task_key"
            )

    def test_commit_and_rollback(self) -> None:
        with transaction.atomic():
            handle = submit(mail.new(order=1), title="kept")
            self.assertEqual(submitted(), [])
        self.assertEqual(submitted(), ["kept"])
        self.assertEqual(open_shaft().get(handle).status, "READY")
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            submit(mail.new(order=1), title="gone")
            raise ZeroDivisionError
        with transaction.atomic():
            with self.assertRaises(ZeroDivisionError), transaction.atomic():
                submit(mail.new(order=1), title="gone with its savepoint")
                raise ZeroDivisionError
            submit_many([NewTask("mail", title="many"), NewTask("mail", title="many")])
            submit_dag("Two", [NewTask("a", key="a", title="a"), NewTask("b", title="b", depends_on=["a"])])
        submit(mail.new(order=1), title="without a transaction", delay=60)
        self.assertEqual(submitted(), ["a", "b", "kept", "many", "many", "without a transaction"])

    def test_an_error_leaves_the_transaction_usable(self) -> None:
        with transaction.atomic():
            submit(NewTask("mail", id="task_1", title="first"))
            with self.assertRaises(AlreadyExistsError):
                submit(NewTask("mail", id="task_1"))
            Order.objects.create(title="x")
        self.assertEqual(submitted(), ["first"])
        with self.assertRaises(transaction.TransactionManagementError), transaction.atomic():
            order = Order.objects.get()
            with self.assertRaises(IntegrityError):
                Order.objects.create(id=order.id, title="y")
            submit(NewTask("mail", title="in a broken transaction"))
        self.assertEqual(submitted(), ["first"])

    def test_on_commit(self) -> None:
        with transaction.atomic():
            submit_on_commit(mail.new(order=1), title="after the commit")
            with self.assertRaisesRegex(InvalidInputError, "priority"):
                submit_on_commit(mail.new(order=1), priority=-1)
            self.assertEqual(submitted(), [])
        self.assertEqual(submitted(), ["after the commit"])
        with self.assertRaises(ZeroDivisionError), transaction.atomic():
            submit_on_commit(mail.new(order=1), title="never")
            raise ZeroDivisionError
        self.assertEqual(submitted(), ["after the commit"])

    def test_requests(self) -> None:
        found = self.client.get("/buy?title=Gears")
        task = open_shaft().get(found.content.decode())
        self.assertEqual((task.type, task.tags), ("mail", ["shop"]))
        with self.assertRaisesRegex(RuntimeError, "after the submission"):
            self.client.get("/buy?title=fail")
        self.assertEqual(Order.objects.count(), 1)
        self.assertEqual(len(submitted()), 1)

    async def test_asynchronous_requests(self) -> None:
        found: Any = await AsyncClient().get("/buy-async?title=Belts")
        order = await Order.objects.aget()
        task = open_shaft().get(found.content.decode())
        close()
        self.assertEqual(task.spec, {"order": order.id})

    def test_other_databases(self) -> None:
        with self.assertRaisesRegex(
            SettingsError, "'lite' is SQLite, but Lineshaft needs PostgreSQL.*LINESHAFT_URL"
        ):
            submit(mail.new(order=1), using="lite")
        # As a backend for PostgreSQL with another driver.
        with (
            patch.object(connections["lite"], "vendor", "postgresql"),
            self.assertRaisesRegex(InvalidInputError, "'lite' uses sqlite3.*only with psycopg 3"),
        ):
            submit(mail.new(order=1), using="lite")

    databases = ("default", "lite")


class InOneTransaction(TestCase):
    """Django rolls the test back, and the tasks with it."""

    def test_submission(self) -> None:
        handle = submit(mail.new(order=1), title="rolled back with the test")
        with connection.cursor() as cursor:
            cursor.execute("SELECT title FROM lineshaft.task WHERE id = %s", [handle.id])
            self.assertEqual(cursor.fetchall(), [("rolled back with the test",)])

    def test_on_commit(self) -> None:
        with self.captureOnCommitCallbacks() as callbacks:
            submit_on_commit(mail.new(order=1))
        self.assertEqual(len(callbacks), 1)

    def test_nothing_is_left(self) -> None:
        self.assertNotIn("rolled back with the test", submitted())
