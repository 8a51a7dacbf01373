"""A small shop on the PostgreSQL that DATABASE_HOST, DATABASE_USER and DATABASE_NAME name."""

import os

SECRET_KEY = "of a test"
DEBUG = False
ALLOWED_HOSTS = ["testserver"]
ROOT_URLCONF = "shop.urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["lineshaft.integrations.django", "shop"]
LINESHAFT_MIGRATE = True
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.postgresql",
        "HOST": os.environ["DATABASE_HOST"],
        "USER": os.environ["DATABASE_USER"],
        "NAME": os.environ["DATABASE_NAME"],
        "ATOMIC_REQUESTS": True,
        "TEST": {"NAME": os.environ["DATABASE_NAME"] + "_django"},
    },
    "lite": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"},
}
