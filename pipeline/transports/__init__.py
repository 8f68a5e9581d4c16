"""Transports: where requests come from and replies go. Read `actors/ports.py` first.

Who calls it: `pipeline.app` opens one transport per route with `open_transport`.
What must stay true: importing this package imports no broker client; each transport is imported
when it is opened. All of them pass the one suite in `tests/conformance/`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from actors.ports import Clock, Metrics, Sink, Source
from pipeline.transports.options import (
    SECRET_FIELDS,
    FileOptions,
    InprocOptions,
    KafkaOptions,
    RedisOptions,
    TransportOptions,
)
from pipeline.transports.urls import parse_url

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
    match options:
        case KafkaOptions():
            from pipeline.transports.kafka.sink import KafkaSink
            from pipeline.transports.kafka.source import KafkaSource

            kafka_source = KafkaSource(options, clock=clock, metrics=metrics)
            kafka_sink = KafkaSink(options, metrics=metrics)
            await _open_both(
                kafka_source, kafka_source.open, lambda: kafka_sink.open(kafka_source.facts)
            )
            return Transport(kafka_source, kafka_sink)
        case RedisOptions():
            from pipeline.transports.redis.sink import RedisSink
            from pipeline.transports.redis.source import RedisSource

            redis_source = RedisSource(options, clock=clock, metrics=metrics)
            redis_sink = RedisSink(options, metrics=metrics)
            try:
                await _open_both(redis_source, redis_source.open, redis_sink.open)
            except BaseException:
                await redis_sink.aclose()
                raise
            return Transport(redis_source, redis_sink)
        case InprocOptions():
            from pipeline.transports.inproc import InprocSink, InprocSource, broker_for

            broker = broker_for(options)
            inproc_source = InprocSource(broker, options=options, clock=clock, metrics=metrics)
            await inproc_source.open()
            return Transport(inproc_source, InprocSink(broker))
        case FileOptions():
            from pipeline.transports.files import FileSink, FileSource

            file_source = FileSource(options, clock=clock, metrics=metrics)
            file_sink = FileSink(options, metrics=metrics)
            await _open_both(file_source, file_source.open, file_sink.open)
            return Transport(file_source, file_sink)


async def _open_both(
    source: Source,
    open_source: Callable[[], Awaitable[None]],
    open_sink: Callable[[], Awaitable[None]],
) -> None:
    try:
        await open_source()
        await open_sink()
    except BaseException:
        await source.aclose()
        raise
