"""The entry point of the command: Ctrl-C ends it without a traceback at any moment, also during imports."""

import signal


def main() -> int:
    try:
        from lineshaft.cli.main import main as run  # noqa: PLC0415 - within the try

        code = run()
    except KeyboardInterrupt:
        code = 130
    # What Python does at its end can't be interrupted in an orderly way.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return code
