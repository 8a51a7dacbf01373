"""Output gates: what an output must pass before its task counts as completed.

A check looks at what was handed in and gives a verdict. It knows nothing of the database and changes nothing;
what a verdict leads to is the store's business (store/gates.py). `registry.Checks` holds all of them: those
that are done in an instant (schema, pattern, report) run in the process that completes the task, the others
(a command, a judge, checks of the user's own that wait for something) in the validator (duties/validator.py),
and a person's in the queue of approvals.

A check that can't decide (the judge is away, the command is not allowed here) raises `NoVerdict`: it is tried
again later, and no attempt of the task fails for it.
"""
