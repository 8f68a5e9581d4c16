"""The suite over the in-process broker, the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from pipeline.transports.inproc.broker import InprocBroker, broker_for
from pipeline.transports.inproc.options import InprocOptions
from tests.conformance.transport_suite import TransportSuite
from tests.support.servers import unique


class InprocHarness:
    tombstones = True
    headers = True
    bad_destinations = ["embedstream.replies", "inproc:", "inproc:a\nb", "list:embedstream.x"]  # noqa: RUF012

    def __init__(self) -> None:
        self.name = unique("t")
        self.broker: InprocBroker = broker_for(self.options())

    def options(self, **overrides: Any) -> InprocOptions:
        settings = {"name": self.name, "max_record_bytes": 100_000, "release_backoff_ms": 5}
        return InprocOptions(**{**settings, **overrides})

    async def produce(
        self, body: bytes | None, headers: Mapping[str, bytes] | None = None, key: str | None = None
    ) -> None:
        await self.broker.put(body, headers, key and unique(key))

    def reply_destination(self) -> str:
        return "inproc:" + unique("reply")

    async def replies(self, destination: str, done: Callable[[list[bytes]], bool]) -> list[bytes]:
        found = [reply.body for reply in self.broker.replies(destination)]
        assert done(found)
        return found

    async def unsettled(self) -> int:
        return self.broker.unsettled


class TestInproc(TransportSuite):
    @pytest.fixture
    def harness(self) -> InprocHarness:
        return InprocHarness()
