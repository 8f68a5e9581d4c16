"""One connected client: calls, the link that carries them, and the task that runs the link.

Who calls it: `AsyncClient`, one session per process and event loop.
What must stay true: a call ends by its deadline, whatever the broker does; a cancelled call is
withdrawn; nothing outlives `aclose`; if the link ends, every call ends with it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import secrets

from ._calls import Call, Calls, Outcome
from ._links import Link
from ._urls import Endpoint, RedisEndpoint
from .errors import ClientClosed, ClientFull, Internal, NoReply

log = logging.getLogger(__name__)

_CANCEL_AGAIN_S = 0.5


class Session:
    """Must be made, used and closed on one event loop."""

    def __init__(self, endpoint: Endpoint, *, max_pending: int) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.get_running_loop()
        self.calls = Calls()
        self._max_pending = max_pending
        self._prefix = secrets.token_hex(8)
        self._numbers = itertools.count(1)
        self.link: Link
        if isinstance(endpoint, RedisEndpoint):
            from ._redis import RedisLink

            self.link = RedisLink(endpoint, self.calls)
        else:
            from ._kafka import KafkaLink

            self.link = KafkaLink(endpoint, self.calls)
        self._task = self.loop.create_task(self.link.run(), name="embedstream-client")
        self._task.add_done_callback(self._fail_all)

    def next_id(self) -> str:
        """A request id that no other client and no other call has."""
        return f"{self._prefix}-{next(self._numbers)}"

    @property
    def ended(self) -> bool:
        return self._task.done()

    def _fail_all(self, task: asyncio.Task[None]) -> None:
        """The link has ended: nobody else would end the calls."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            self.calls.fail_all(ClientClosed("the client was closed"))
            return
        log.error(
            "the connection ended by a fault of the client; the next call opens another",
            exc_info=error,
        )
        self.calls.fail_all(Internal(f"the client failed ({type(error).__name__}); this is a bug"))

    async def ask(
        self, request_id: str, body: bytes, headers: dict[str, bytes], timeout_s: float
    ) -> tuple[Outcome, tuple[bytes, ...]]:
        """Send one record; its reply, parts joined, and the reply's own records.

        Raises `NoReply`, `Unreachable`, `BadReply`, `ClientClosed`, `ClientFull`. Cancelling it
        withdraws the request.
        """
        if len(self.calls) >= self._max_pending:
            raise ClientFull(
                f"{self._max_pending} calls wait already: send fewer at once, or raise max_pending",
                limit=self._max_pending,
            )
        call = Call(request_id, body, headers)
        self.calls.add(call)
        timer = self.loop.call_later(timeout_s, _expire, call)
        try:
            self.link.send(call)
            outcome = await call.future
        except _TimedOut:
            silence = await self.link.why_silent(call)
            raise NoReply(f"no reply within {timeout_s:.3g} s: {silence}") from None
        except asyncio.CancelledError:
            self.link.withdraw(call)
            raise
        finally:
            timer.cancel()
            self.calls.remove(call)
        return outcome, call.bodies

    async def aclose(self) -> None:
        """Fail what waits, close the connections. Safe to call again."""
        while not self._task.done():
            self._task.cancel()  # a library may swallow one
            await asyncio.wait({self._task}, timeout=_CANCEL_AGAIN_S)


class _TimedOut(Exception):
    pass


def _expire(call: Call) -> None:
    call.fail(_TimedOut())
