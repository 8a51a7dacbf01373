"""Task: why it isn't running, what happened, what came out."""

from lineshaft.dashboard.visit import Pages

pages = Pages()
