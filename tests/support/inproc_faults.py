"""An in-process broker that breaks at named points.

Who calls it: tests of egress, of the service and of the transport itself.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from actors.ports import PublishError
from pipeline.transports.inproc.broker import InprocBroker, InprocReply


@dataclass(slots=True)
class Faults:
    """All counters run down to zero.

    fail_publishes      the next N publishes raise `PublishError(retryable=True)`
    drop_publishes      the next N publishes report success and lose the record
    before_publish      awaited before each publish (delay, gate, raise)
    lose_settles        the next N settles never reach the broker (a crash before the commit)
    """

    fail_publishes: int = 0
    drop_publishes: int = 0
    before_publish: Callable[[str, bytes], Awaitable[None]] | None = None
    lose_settles: int = 0


class FaultyBroker(InprocBroker):
    """`faults` says what breaks next."""

    def __init__(self) -> None:
        super().__init__()
        self.faults = Faults()

    def settle(self, serial: int) -> None:
        if self.faults.lose_settles > 0:
            self.faults.lose_settles -= 1
        else:
            super().settle(serial)

    async def publish(self, destination: str, reply: InprocReply) -> None:
        if self.faults.before_publish is not None:
            await self.faults.before_publish(destination, reply.body)
        if self.faults.fail_publishes > 0:
            self.faults.fail_publishes -= 1
            raise PublishError("injected publish failure", retryable=True)
        if self.faults.drop_publishes > 0:
            self.faults.drop_publishes -= 1
        else:
            await super().publish(destination, reply)
