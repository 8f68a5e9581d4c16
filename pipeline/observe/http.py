"""The health server: is the loop alive, may traffic come, and why not; over a tiny HTTP port.

    GET /live         200 while the event loop runs (of several processes: of each)
    GET /ready        200, or 503 with the reasons as JSON
    GET /metrics      Prometheus text
    GET /statistics   JSON: queues, budgets, sources, models

Who calls it: `pipeline.app` starts a `HealthServer` before it connects or loads anything.
What must stay true: no probe takes the way of a request, so a full queue never looks like a dead
service; a request is bounded in bytes and in time; no tasks.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from pipeline.lifecycle import ExitStatus, OperatorError
from pipeline.observe.readiness import Readiness
from pipeline.settings.records import HealthSettings

MAX_REQUEST_BYTES = 8192
REQUEST_TIMEOUT_S = 5.0
"""From connect to complete request, and again for a peer that does not read. Shorter than any
probe's patience makes no sense; longer lets idle sockets pile up."""
MAX_CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class HealthViews:
    """Where the server gets its answers. Called on the event loop; must not block or raise."""

    readiness: Callable[[], Readiness]
    statistics: Callable[[], Mapping[str, Any]]
    metrics: Callable[[], bytes]
    metrics_type: str = "text/plain; version=0.0.4; charset=utf-8"
    hung: Callable[[], str | None] = lambda: None
    """Why `/live` is no although this loop runs: of a service of several processes."""


class HealthServer:
    """The port. `open` first thing in `serve`, `aclose` last."""

    def __init__(self, settings: HealthSettings, views: HealthViews) -> None:
        self._settings = settings
        self._views = views
        self._server: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self.port: int | None = None
        """The port it listens on, once open; None when off."""

    async def open(self, listener: socket.socket | None = None) -> None:
        """Listen: on `listener`, a bound socket that somebody else keeps, or on the port of the settings.

        Does nothing when that port is 0.

        Raises:
            OperatorError: the address cannot be bound; names `health.port`.
        """
        if listener is not None:
            self._server = await asyncio.get_running_loop().create_server(
                lambda: _Connection(self._answer, self._connections), sock=listener
            )
        elif self._settings.port != 0:
            await self.listen(self._settings.port)

    async def listen(self, port: int) -> None:
        """Listen on `port`; here 0 means any free one."""
        host = self._settings.host
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(
                lambda: _Connection(self._answer, self._connections), host, port
            )
        except (OSError, OverflowError) as error:
            raise OperatorError(
                _bind_message(host, port, error), exit_status=ExitStatus.USAGE
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def aclose(self) -> None:
        """Stop listening and drop open connections. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        for connection in list(self._connections):
            connection.abort()
        await server.wait_closed()

    def _answer(self, method: str, target: str) -> tuple[int, str, bytes]:
        """Status, content type and body of one request."""
        path = target.split("?", 1)[0].rstrip("/") or "/"
        if method not in ("GET", "HEAD"):
            return 405, "text/plain", b"GET and HEAD only\n"
        if path == "/live":
            hung = self._views.hung()
            return 503 if hung else 200, "text/plain", f"{hung or 'live'}\n".encode()
        if path == "/ready":
            verdict = self._views.readiness()
            return 200 if verdict.ready else 503, "application/json", _json(verdict)
        if path == "/metrics":
            return 200, self._views.metrics_type, self._views.metrics()
        if path == "/statistics":
            return 200, "application/json", _json(self._views.statistics())
        return 404, "text/plain", b"/live /ready /metrics /statistics\n"


_REASONS = {
    200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed",
    408: "Request Timeout", 431: "Request Header Fields Too Large", 500: "Internal Server Error",
    503: "Service Unavailable",
}  # fmt: skip


class _Connection(asyncio.Protocol):
    """One request, one answer, closed. A protocol rather than streams: no task per connection."""

    def __init__(
        self,
        answer: Callable[[str, str], tuple[int, str, bytes]],
        open_connections: set[_Connection],
    ) -> None:
        self._answer = answer
        self._open = open_connections
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._answered = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if len(self._open) >= MAX_CONNECTIONS:
            transport.abort()
            return
        self._open.add(self)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(REQUEST_TIMEOUT_S, self._on_timeout)

    def data_received(self, data: bytes) -> None:
        if self._answered:
            return
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0 and len(self._received) <= MAX_REQUEST_BYTES:
            return
        if end < 0 or end > MAX_REQUEST_BYTES:
            self._reply("GET", 431, "text/plain", b"request too large\n")
            return
        line = bytes(self._received[: self._received.find(b"\r\n")])
        try:
            method, target, version = line.decode("ascii").split(" ")
        except ValueError:
            self._reply("GET", 400, "text/plain", b"not an HTTP request\n")
            return
        if not version.startswith("HTTP/1."):
            self._reply("GET", 400, "text/plain", b"HTTP/1.1 only\n")
            return
        try:
            status, kind, body = self._answer(method, target)
        except Exception as error:  # noqa: BLE001  boundary: a broken view must not look like a dead loop
            status, kind, body = 500, "text/plain", f"{type(error).__name__}\n".encode()
        self._reply(method, status, kind, body)

    def _reply(self, method: str, status: int, kind: str, body: bytes) -> None:
        assert self._transport is not None
        self._answered = True
        self._received.clear()
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}\r\n"
            f"Content-Length: {len(body)}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n"
        )
        self._transport.write(head.encode() + (b"" if method == "HEAD" else body))
        self._transport.close()  # after the bytes above are flushed
        self._restart_timer()

    def _restart_timer(self) -> None:
        """A peer that does not read its answer is dropped as well."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(REQUEST_TIMEOUT_S, self.abort)

    def _on_timeout(self) -> None:
        if not self._answered:
            self._reply("GET", 408, "text/plain", b"no request in time\n")

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        if self._timer is not None:
            self._timer.cancel()


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=str) + b"\n"


def _bind_message(host: str, port: int, error: Exception) -> str:
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return (
            f"health.port {port} is in use on {host}: stop the other process, or set health.port "
            "to a free port (0 turns the health server off)"
        )
    if number == errno.EACCES:
        return f"health.port {port} needs privileges: set health.port to a port above 1023"
    return (
        f"cannot listen on {host}:{port} ({getattr(error, 'strerror', None) or error}): set "
        "health.host to an address of this machine (0.0.0.0 for all)"
    )
