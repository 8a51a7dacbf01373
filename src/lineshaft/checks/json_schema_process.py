"""Separate process of a JSON Schema check: reads a schema and data, writes the reasons of a rejection."""

import sys

import msgspec

from lineshaft.checks.json_schema import check_here


def main() -> None:
    schema, data = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[msgspec.Raw, object])
    verdict = check_here(bytes(schema), data)
    sys.stdout.buffer.write(msgspec.json.encode(None if verdict.passed else verdict.reasons))


if __name__ == "__main__":
    main()
