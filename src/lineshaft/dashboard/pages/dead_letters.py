"""Dead letters: groups by like error, and decisions about them."""

from lineshaft.dashboard.visit import Pages

pages = Pages()
