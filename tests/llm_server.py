"""A server with OpenAI's protocol that gives the answers a test sets. It is the outside world: real HTTP.

The test's process serves. What calls it may be any process, and may be killed; `requests` has what arrived.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any

USAGE = {"prompt_tokens": 1_000, "completion_tokens": 100, "total_tokens": 1_100}


@dataclass
class Reply:
    """One answer. What isn't text is sent as its JSON."""

    content: Any = "hello"
    #: (name, arguments), or (name, arguments, id).
    tools: Sequence[tuple[Any, ...]] = ()
    usage: Any = field(default_factory=lambda: dict(USAGE))
    #: The name of the model in the answer. None: that of the request.
    model: str | None = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    #: Replaces the whole body.
    body: bytes | None = None
    finish_reason: str | None = None
    #: The answer waits for this.
    hold: Event | None = None
    #: The connection ends after so many bytes of the answer.
    cut_after: int | None = None

    @property
    def text(self) -> str | None:
        if self.tools and self.content == "hello":
            return None
        return self.content if isinstance(self.content, str) else json.dumps(self.content)

    def _calls(self) -> list[dict[str, Any]]:
        return [
            {
                "id": call[2] if len(call) > 2 else f"call_{number}",
                "type": "function",
                "function": {"name": call[0], "arguments": json.dumps(call[1])},
            }
            for number, call in enumerate(self.tools)
        ]

    def completion(self, request: dict[str, Any]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tools:
            message["tool_calls"] = self._calls()
        why = self.finish_reason or ("tool_calls" if self.tools else "stop")
        choice = {"index": 0, "message": message, "finish_reason": why}
        head = {"id": "1", "object": "chat.completion", "created": 1_800_000_000}
        return head | {"model": self.model or request["model"], "choices": [choice], "usage": self.usage}

    def chunks(self, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
        head = {"id": "1", "object": "chat.completion.chunk", "created": 1_800_000_000}
        head["model"] = self.model or request["model"]

        def chunk(delta: dict[str, Any], why: str | None = None) -> dict[str, Any]:
            return head | {"choices": [{"index": 0, "delta": delta, "finish_reason": why}]}

        words = [] if self.text is None else self.text.split(" ")
        for number, word in enumerate(words):
            yield chunk({"role": "assistant", "content": word if number == 0 else f" {word}"})
        for number, call in enumerate(self._calls()):
            yield chunk({"role": "assistant", "tool_calls": [{"index": number, **call}]})
        yield chunk({}, self.finish_reason or ("tool_calls" if self.tools else "stop"))
        yield head | {"choices": [], "usage": self.usage}

    def encoded(self, request: dict[str, Any]) -> bytes:
        if self.body is not None:
            return self.body
        if self.status >= 400:
            return json.dumps({"error": {"message": self.text, "type": "error"}}).encode()
        if request.get("stream"):
            events = [json.dumps(one) for one in self.chunks(request)]
            return "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()
        return json.dumps(self.completion(request)).encode()


@dataclass
class LLMServer:
    url: str = ""
    #: What to answer to a request; by default `reply`.
    answer: Callable[[dict[str, Any]], Reply] | None = None
    reply: Reply = field(default_factory=Reply)
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    #: Set at each request.
    asked: Event = field(default_factory=Event)
    _lock: Lock = field(default_factory=Lock)

    def plan(self, *replies: Reply) -> None:
        """Answer with these, one after the other; the last one from then on."""
        left = list(replies)

        def answer(_: dict[str, Any]) -> Reply:
            return left.pop(0) if len(left) > 1 else left[0]

        self.answer = answer

    def next(self, request: dict[str, Any]) -> Reply:
        with self._lock:
            return self.reply if self.answer is None else self.answer(request)

    def wait_for(self, count: int) -> None:
        """Until so many requests have arrived."""
        deadline = time.monotonic() + 60
        while len(self.requests) < count:
            assert self.asked.wait(deadline - time.monotonic()), f"{len(self.requests)} of {count} requests"
            self.asked.clear()

    def sent(self, number: int = -1) -> str:
        """All texts of a request."""
        return json.dumps(self.requests[number]["messages"], ensure_ascii=False)


@contextmanager
def llm_server(chosen: LLMServer | None = None) -> Iterator[LLMServer]:
    server = chosen or LLMServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with server._lock:
                server.requests.append({"path": self.path, **request})
                server.headers.append({name.title(): value for name, value in self.headers.items()})
            server.asked.set()
            reply = server.next(request)
            if reply.hold is not None:
                reply.hold.wait(60)
            body = reply.encoded(request)
            kind = "text/event-stream" if request.get("stream") and reply.status < 400 else "application/json"
            try:
                self.send_response(reply.status)
                for name, value in {
                    "Content-Type": kind,
                    **reply.headers,
                    "Content-Length": str(len(body)),
                }.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body[: reply.cut_after])
                if reply.cut_after is not None:
                    self.wfile.flush()
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
            except OSError:
                self.close_connection = True  # the caller is gone

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_port}/v1"
    thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
