"""Guards: what is held back, until when, and how much waits behind it."""

from lineshaft.dashboard.visit import Pages

pages = Pages()
