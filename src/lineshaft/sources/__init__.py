"""Sources: what happens becomes work. Definitions, templates, ticks and signatures, without a database.

`definition.py` checks what a caller wrote and fills in defaults; `template.py` renders work with the
expressions of `expressions.py`; `ticks.py` has the times of schedules, `signatures.py` and `deliveries.py`
the requests of webhooks, `file.py` the operator's file. `engine/sources/` stores and fires them.
"""
