"""A service behind a Redis or Valkey stream, or list.

Who calls it: `_session`.
What must stay true: one connection sends, in pipelines of what has gathered, and one reads, whatever
the number of calls; no caller's cancellation touches a connection; every wait has a time-out of ours,
longer than the block it covers; a request that may have been lost with its server is sent again, the
same bytes under the same id.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Mapping
from typing import Any

from ._calls import Call, Calls
from ._links import Backoff, leave_if_abandoned, leave_if_cancelled, together
from ._servers import connect
from ._urls import RedisEndpoint
from ._wire.codec import encode_request
from ._wire.headers import REQUEST_ID
from ._wire.requests import CancelRequest, Limits
from .errors import Overloaded, Unreachable

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 5.0
"""How long Redis may take for a command that does not block; a half-open connection is found then."""
BLOCK_S = 2.0
"""One blocking read. The socket's time-out is this and `ANSWER_TIMEOUT_S`."""
_READ_ENTRIES = 512
_PIPELINE_COMMANDS = 256
_PIPELINE_BYTES = 4 * 1024 * 1024
_EXPLAIN_S = 0.25
_CLOSE_S = 2.0
_START = "0-0"
_BUSY = "the service is busy or stopped: allow more time, or look at its log"
_WRONG_SERVER = ("READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS")
_MOVED = ("MovedError", "AskError")
_WRONG_SERVER_TYPES = (
    "ReadOnlyError",
    "BusyLoadingError",
    "MasterDownError",
    "ClusterDownError",
    "TryAgainError",
)
"""Answers of a server that is not the right one now, after a fail-over or while it starts: by their
first word, or by the class that redis-py makes of it."""


class _Command:
    """One command in the outbox: a call's record, or one whose answer somebody awaits."""

    __slots__ = ("answer", "args", "call", "size")

    def __init__(self, args: tuple[Any, ...], call: Call | None = None) -> None:
        self.args = args
        self.call = call
        self.size = sum(len(a) for a in args if isinstance(a, bytes))
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    @property
    def wanted(self) -> bool:
        return not (self.answer.done() or (self.call is not None and self.call.ended))

    def resolve(self, answer: Any) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class RedisLink:
    """`_links.Link` over two connections."""

    def __init__(self, endpoint: RedisEndpoint, calls: Calls) -> None:
        self._endpoint = endpoint
        self._calls = calls
        self._reply_key = endpoint.reply_prefix + secrets.token_hex(16)
        self.reply_to = f"stream:{self._reply_key}"
        self._outbox: deque[_Command] = deque()  # bounded by the calls
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.trouble: Exception | None = None
        """Why the server cannot be used at the moment."""

    # --- what the session calls -----------------------------------------------------------------

    async def run(self) -> None:
        sender = self._connect(self._endpoint.queue, ANSWER_TIMEOUT_S)
        reader = self._connect(self._reply_key, BLOCK_S + ANSWER_TIMEOUT_S)
        try:
            await together(self._send_forever(sender), self._read_forever(reader))
        finally:
            leave_if_abandoned(self._loop)
            with contextlib.suppress(Exception):
                await asyncio.wait_for(reader.unlink(self._reply_key), _CLOSE_S)
            for client in (sender, reader):
                with contextlib.suppress(Exception):
                    await asyncio.wait_for(client.aclose(), _CLOSE_S)

    def send(self, call: Call) -> None:
        self._put(_Command(self._request(call.body, call.headers), call))

    def withdraw(self, call: Call) -> None:
        if not call.sent:
            return  # still in the outbox, and not wanted any more
        self._put(_Command(self._request(*encode_request(CancelRequest(id=call.id)))))

    def _request(self, body: bytes, headers: Mapping[str, bytes]) -> tuple[Any, ...]:
        """The command that queues a record. An element of a list has no headers: its body says all."""
        endpoint = self._endpoint
        if endpoint.key is not None:
            return "LPUSH" if endpoint.take_from == "right" else "RPUSH", endpoint.key, body
        fields = [part for header in headers.items() for part in header]
        return "XADD", endpoint.stream, "*", "data", body, *fields

    async def ping(self) -> None:
        command = self._put(_Command(("PING",)))
        try:
            answer = await asyncio.wait_for(command.answer, CONNECT_TIMEOUT_S + ANSWER_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise self._unreachable(self.trouble) from None
        if isinstance(answer, Exception):
            raise self._unreachable(answer)

    async def why_silent(self, call: Call) -> str:
        if self.trouble is not None:
            return self._unreachable(self.trouble).message
        endpoint = self._endpoint
        look = (
            ("XINFO", "GROUPS", endpoint.stream) if endpoint.key is None else ("LLEN", endpoint.key)
        )
        if endpoint.key is not None and len(call.body) > Limits().max_record_bytes:
            return (
                f"a record of a list that the service does not read cannot be answered, and {len(call.body)} "
                "bytes are more than it reads unless its max_record_bytes was raised: split the request"
            )
        looked = self._put(_Command(look))
        misled = None
        if not endpoint.cluster:  # there it may lie on a node that nobody talks to
            misled = self._put(_Command(("EXISTS", f"embedstream.reply.{call.id}")))
        with contextlib.suppress(asyncio.TimeoutError):
            found = await asyncio.wait_for(asyncio.shield(looked.answer), _EXPLAIN_S)
            # Without the right to ask, this says nothing.
            missing = isinstance(found, Exception) and "no such key" in str(found)
            if endpoint.key is not None and isinstance(found, int) and found > 0:
                return (
                    f"{found} requests lie in the list {endpoint.key} at {endpoint.address}: check that a "
                    "service reads it and takes them from this end, or allow more time"
                )
            if missing or found == []:
                return (
                    f"no service reads the stream {endpoint.stream} at {endpoint.address}: "
                    "check that one runs, and its address"
                )
            if misled is None:
                return _BUSY
            if await asyncio.wait_for(asyncio.shield(misled.answer), _EXPLAIN_S) == 1:
                return (
                    "the service refused the reply stream and answered elsewhere: set reply_prefix in "
                    "the address to a prefix that its reply_prefixes allow"
                )
        return _BUSY

    # --- sending --------------------------------------------------------------------------------

    def _put(self, command: _Command) -> _Command:
        self._outbox.append(command)
        self._wake.set()
        return command

    async def _send_forever(self, client: Any) -> None:
        backoff = Backoff()
        while True:
            leave_if_cancelled()
            await self._wake.wait()
            batch = self._next_batch()
            if not batch:
                self._wake.clear()
                continue
            try:
                async with client.pipeline(transaction=False) as pipe:
                    for command in batch:
                        pipe.execute_command(*command.args)
                    answers = await pipe.execute(raise_on_error=False)
                for answer in answers:
                    self._check_server(answer)
            except Exception as error:  # noqa: BLE001  redis-py, the socket, TLS: all mean no server
                leave_if_abandoned(self._loop)
                _note(error)
                await self._sender_failed(client, batch, error)
                await asyncio.sleep(backoff.next_s())
                continue
            self.trouble = None
            backoff.reset()
            for command, answer in zip(batch, answers, strict=True):
                self._sent(command, answer)

    def _next_batch(self) -> list[_Command]:
        batch: list[_Command] = []
        size = 0
        while self._outbox and len(batch) < _PIPELINE_COMMANDS and size < _PIPELINE_BYTES:
            command = self._outbox.popleft()
            if command.wanted:
                batch.append(command)
                size += command.size
        return batch

    async def _sender_failed(self, client: Any, batch: list[_Command], error: Exception) -> None:
        """Whether the batch arrived is unknown: all of it is sent again, once there is a server."""
        self.trouble = error
        with contextlib.suppress(Exception):
            await client.connection_pool.disconnect()
        if self._is_denied(error):
            for command in batch:
                command.resolve(error)
                if command.call is not None:
                    command.call.fail(self._unreachable(error))
            return
        self._outbox.extendleft(command for command in reversed(batch) if command.call is not None)
        for command in batch:
            if command.call is None:
                command.resolve(error)

    def _sent(self, command: _Command, answer: Any) -> None:
        command.resolve(answer)
        call = command.call
        if call is None:
            return
        if not isinstance(answer, Exception):
            call.sent = True
        elif (
            "OOM command not allowed" in str(answer) or type(answer).__name__ == "OutOfMemoryError"
        ):
            call.fail(Overloaded("Redis is at its maxmemory and takes no request now"))
        else:
            call.fail(self._unreachable(answer))

    # --- reading --------------------------------------------------------------------------------

    async def _read_forever(self, client: Any) -> None:
        """Replies from this client's own stream, from wherever reading stopped.

        Entries are removed as soon as they were read. After an outage all that is left is read from
        the start: ids of a server that was promoted or restarted need not follow the old ones.
        """
        backoff = Backoff()
        after, lost = _START, False
        while True:
            leave_if_cancelled()
            await self._calls.wait_for_some()
            try:
                if lost:
                    await client.ping()
                    self._send_again()
                    lost = False
                after = await self._read(client, after)
                backoff.reset()
            except _Refused as refused:
                self._calls.fail_all(self._unreachable(refused.answer))
                await asyncio.sleep(backoff.next_s())
            except Exception as error:  # noqa: BLE001  as in _send_forever
                leave_if_abandoned(self._loop)
                _note(error)
                self.trouble = error
                after, lost = _START, True
                with contextlib.suppress(Exception):
                    await client.connection_pool.disconnect()
                await asyncio.sleep(backoff.next_s())

    async def _read(self, client: Any, after: str) -> str:
        """One blocking read, and the id that the next one begins after."""
        async with client.pipeline(transaction=False) as pipe:
            if after != _START:
                pipe.execute_command("XTRIM", self._reply_key, "MINID", _next_id(after))
            pipe.xread({self._reply_key: after}, count=_READ_ENTRIES, block=int(BLOCK_S * 1000))
            answers = await pipe.execute(raise_on_error=False)
        found = answers[-1]
        if isinstance(found, Exception):
            self._check_server(found)
            raise _Refused(found)
        self.trouble = None
        if not found:
            return _START if not isinstance(answers[0], Exception) else after
        for entry_id, fields in found[0][1]:
            after = entry_id.decode()
            header = fields.get(REQUEST_ID.encode())
            self._calls.take(
                fields.get(b"data"), None if header is None else header.decode("utf-8", "replace")
            )
        return after

    def _send_again(self) -> None:
        """The server may have come back without what it held: the service knows twins by their id."""
        for call in self._calls:
            if call.sent and not call.ended:
                call.sent = False
                self.send(call)

    def _check_server(self, answer: Any) -> None:
        """Raises an answer that a connection made anew would not be given."""
        if isinstance(answer, Exception) and (
            _wrong_server(answer) or (self._endpoint.cluster and _moved(answer))
        ):
            raise answer

    def _is_denied(self, error: Exception) -> bool:
        return _denied(error) and not (self._endpoint.cluster and _moved(error))

    # --- connections ----------------------------------------------------------------------------

    def _connect(self, key: str, timeout_s: float) -> Any:
        return connect(
            self._endpoint,
            key,
            connect_timeout_s=CONNECT_TIMEOUT_S,
            socket_timeout_s=timeout_s,
        )

    def _unreachable(self, error: Exception | None) -> Unreachable:
        """One line, without anything that was sent."""
        what = "no answer in time" if error is None else type(error).__name__
        where = self._endpoint.address
        if error is None or not self._is_denied(error):
            text, retryable = f"Redis at {where} cannot be used ({what}): check that it runs", True
        elif _moved(error):
            text = f"Redis at {where} is one node of a cluster: add cluster=true to the address"
            retryable = False
        else:
            text = f"Redis at {where} refuses this client ({what}): check user, password and its rights"
            retryable = False
        unreachable = Unreachable(text)
        unreachable.retryable = retryable
        return unreachable


class _Refused(Exception):
    """The server answered the read with an error that will not go away by itself."""

    def __init__(self, answer: Exception) -> None:
        super().__init__(type(answer).__name__)
        self.answer = answer


def _wrong_server(error: Exception) -> bool:
    return type(error).__name__ in _WRONG_SERVER_TYPES or str(error).startswith(_WRONG_SERVER)


def _moved(error: Exception) -> bool:
    return type(error).__name__ in _MOVED or str(error).startswith(("MOVED", "ASK "))


def _denied(error: Exception) -> bool:
    """True for what a person has to change: credentials, rights, a key of another type, a cluster."""
    from redis.exceptions import AuthenticationError, AuthorizationError, ResponseError

    kinds = (AuthenticationError, AuthorizationError, ResponseError)
    return isinstance(error, kinds) and not _wrong_server(error)


def _note(error: Exception) -> None:
    """An outage says itself through the calls; anything else is a fault that somebody should see."""
    from redis.exceptions import RedisError

    if not isinstance(error, RedisError | OSError | asyncio.TimeoutError):
        log.warning("the connection failed in an unexpected way", exc_info=error)


def _next_id(entry_id: str) -> str:
    milliseconds, _, sequence = entry_id.partition("-")
    return f"{milliseconds}-{int(sequence or 0) + 1}"
