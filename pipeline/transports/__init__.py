"""Transports: where requests come from and replies go. Read `actors/ports.py` first.

Who calls it: `pipeline.app` opens one transport per route with `open_transport`.
What must stay true: importing this package imports no broker client; each transport is imported
when it is opened. All of them pass the one suite in `tests/conformance/`.
"""

from __future__ import annotations

from dataclasses import dataclass

from actors.ports import Clock, Metrics, Sink, Source

from .options import (
    SECRET_FIELDS,
    FileOptions,
    InprocOptions,
    KafkaOptions,
    RedisOptions,
    TransportOptions,
)
from .urls import parse_url

__all__ = [
    "SECRET_FIELDS",
    "FileOptions",
    "InprocOptions",
    "KafkaOptions",
    "RedisOptions",
    "Transport",
    "TransportOptions",
    "open_transport",
    "parse_url",
]


@dataclass(frozen=True, slots=True)
class Transport:
    """A source and the sink that its replies and dead letters use. Close the source first."""

    source: Source
    sink: Sink


async def open_transport(options: TransportOptions, *, clock: Clock, metrics: Metrics) -> Transport:
    """Connect both halves. The caller then starts `source.run()` as a task.

    Raises `ValueError` when `options.check()` finds a contradiction and `ConnectionError`, with a
    one-line remedy, when the broker cannot be used; nothing stays open then.
    """
    problems = options.check()
    if problems:
        raise ValueError("; ".join(problems))
    transport: Transport
    match options:
        case InprocOptions():
            from .inproc import InprocSink, InprocSource, broker_for

            broker = broker_for(options)
            transport = Transport(
                InprocSource(broker, clock=clock, metrics=metrics), InprocSink(broker)
            )
            await transport.source.open()
    return transport
