"""A server with OpenAI's protocol that gives the responses a test sets."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


@dataclass
class JudgeServer:
    url: str = ""
    status: int = 200
    #: The content of the model's message; a string is sent as it is, anything else as JSON.
    content: Any = field(default_factory=lambda: {"score": 0.9, "reasons": ["clear"]})
    usage: Any = field(default_factory=lambda: {"prompt_tokens": 1_000, "completion_tokens": 100})
    model: str = "gpt-4o-mini"
    #: Replaces the whole body.
    body: bytes | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def answer(self) -> bytes:
        if self.body is not None:
            return self.body
        said = self.content if isinstance(self.content, str) else json.dumps(self.content)
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        found = {"id": "1", "object": "chat.completion", "model": self.model, "choices": [choice]}
        return json.dumps(found | {"usage": self.usage}).encode()


@contextmanager
def judge_server(chosen: JudgeServer | None = None) -> Iterator[JudgeServer]:
    judge = chosen or JudgeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            judge.requests.append({"path": self.path, **json.loads(body)})
            judge.headers.append(dict(self.headers))
            answer = judge.answer()
            self.send_response(judge.status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    judge.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield judge
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
