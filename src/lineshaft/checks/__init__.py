"""Output gates: the checks that an output must pass before its task is completed.

A check receives an output and returns a verdict. It doesn't use the database and changes nothing; the engine
(engine/review/gates.py) acts on the verdict. `registry.Checks` contains all checks: the instant ones (schema,
pattern, report) run in the process that completes the task, the others (a command, a judge, a user's own
asynchronous check) in the validator (duties/validator.py). A person's check waits in the list of approvals.

A check that can't decide (the judge is unreachable, the command is not allowed here) raises `NoVerdict`. It
is repeated later, and the attempt doesn't fail.
"""
