"""The entry point of the command: Ctrl-C ends it without a traceback at any moment, also during imports."""


def main() -> int:
    try:
        import signal  # noqa: PLC0415 - within the try, as all imports

        from lineshaft.cli.main import main as run  # noqa: PLC0415

        code = run()
        # What Python does at its end can't be interrupted in an orderly way.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        return 130
    return code
