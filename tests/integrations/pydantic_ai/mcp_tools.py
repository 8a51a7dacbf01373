"""An MCP server over stdio, started by tests: its tools write down that they were called."""

import os
import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer

server = MCPServer("tools")
log = Path(sys.argv[1])


@server.tool()
def add(one: int, other: int) -> int:
    """Add two numbers."""
    with log.open("a") as calls:
        calls.write(f"add {one} {other}\n")
    return one + other


with log.open("a") as started:
    started.write("started\n")
    started.writelines(f"{name}={value}\n" for name, value in os.environ.items())
server.run("stdio")
