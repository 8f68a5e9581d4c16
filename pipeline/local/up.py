"""`embedstream up`: real brokers on this machine with the service attached, until Ctrl-C.

Who calls it: the CLI (`embedstream up`); the demo starts that command in the background.
What must stay true: brokers start before the service and stop after it has drained; nothing outlives
this process, however it ends; the addresses are printed, and written to the ready file, only once
the service takes requests; a broker that dies stops the service with a clear line.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.panel import Panel

from actors.ports import Metrics
from pipeline.app import App
from pipeline.demo.catalog import demo_models
from pipeline.lifecycle import ExitStatus, OperatorError, StopSignal, beside, watch_signals
from pipeline.local.kafka import ApacheKafka, PackagedKafka
from pipeline.local.redis import RedisServer
from pipeline.local.server import LocalServer, LocalServerError, free_port
from pipeline.observe.metrics import PrometheusMetrics
from pipeline.settings.load import RouteSettings, Settings
from pipeline.transports import broker_names
from pipeline.transports.redis.options import REPLY_LIST
from pipeline.whole_file import NoReader, WholeFile

PARTITIONS = 6
_WATCH_S = 0.25
"""How soon a dead broker or a dead parent is noticed."""

# The packaged broker makes a group's first member wait for half of the session time-out, and answers
# an idle fetch only after half of its wait: short values here are what makes it quick.
# It hands out no producer ids either, which `idempotent=auto` would find out and warn about.
_PACKAGED_KAFKA = (
    "session_timeout_ms=4000&heartbeat_interval_ms=500&fetch_max_wait_ms=15&idempotent=false"
)
_APACHE_KAFKA = "session_timeout_ms=6000&heartbeat_interval_ms=1500&fetch_max_wait_ms=50"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpOptions:
    """What `embedstream up` may be told. A port of 0 is any free one.

    kafka_home      an unpacked Apache Kafka to run instead of the packaged broker
    ready_file      gets the addresses as JSON (`Addresses`) once the service is ready
    stop_with_parent  drain and stop when the parent process is gone
    """

    kafka_port: int = 0
    redis_port: int = 0
    health_port: int = 0
    kafka_home: Path | None = None
    ready_file: Path | None = None
    stop_with_parent: bool = False


class Addresses(msgspec.Struct, frozen=True, kw_only=True):
    """Where everything is, for people, the demo and tests. The content of the ready file."""

    pid: int
    kafka: str
    kafka_kind: str
    redis: str
    redis_kind: str
    health: str
    request_topic: str = broker_names.REQUESTS
    reply_topic: str = broker_names.REPLIES
    request_stream: str = broker_names.REQUESTS
    reply_list_prefix: str = REPLY_LIST
    models: tuple[str, ...] = ()
    max_batch_tokens: Mapping[str, int] = {}


def up_settings(
    base: Settings, *, kafka: str, kafka_kind: str, redis: str, health: int
) -> Settings:
    """`base` with our two routes: bulk over Kafka, interactive over Redis.

    Args:
        kafka: bootstrap address; redis: `redis://host:port`; health: port.
    """
    timing = _APACHE_KAFKA if kafka_kind == ApacheKafka.kind else _PACKAGED_KAFKA
    group = f"group={broker_names.GROUP}"
    routes = (
        RouteSettings(
            name="kafka-requests",
            source=f"kafka://{kafka}/{broker_names.REQUESTS}?{group}&{timing}&partitions={PARTITIONS}",
            lane="bulk",
        ),
        RouteSettings(
            name="redis-rpc",
            source=f"{redis}/{broker_names.REQUESTS}?{group}",
            lane="interactive",
        ),
    )
    return msgspec.structs.replace(
        base,
        models=base.models or demo_models(),
        routes=routes,
        health=msgspec.structs.replace(base.health, port=health),
    )


async def run_up(
    options: UpOptions,
    *,
    settings: Settings | None = None,
    console: Console | None = None,
    metrics: Metrics | None = None,
) -> ExitStatus:
    """Brokers, then the service, until a signal; then the service drains and the brokers stop.

    Args:
        settings: models, limits, batching and so on; its routes and health port are replaced.

    Raises:
        OperatorError: a broker, a port or a model cannot be had.
    """
    base = settings or Settings()
    console = console or Console()
    stop = StopSignal(base.lifecycle.drain_budget_s)
    starting = asyncio.timeout(None)

    def on_action(action: str, signum: int) -> None:
        _say_stop(console, action)
        with contextlib.suppress(RuntimeError):  # the brokers have started: the service drains
            starting.reschedule(0.0)

    with watch_signals(stop, on_action=on_action):
        async with AsyncExitStack() as resources:
            try:
                async with starting:
                    kafka, redis = await _start_servers(options, resources, stop, console)
            except TimeoutError:
                return ExitStatus.OK
            health = options.health_port or free_port()
            full = up_settings(
                base, kafka=kafka.address, kafka_kind=kafka.kind, redis=redis.url, health=health
            )
            console.print(f"[dim]loading {', '.join(full.models)}[/dim]", highlight=False)
            app = App(full, metrics=metrics or PrometheusMetrics(), serve_health=True)
            return await _serve(app, stop, options, (kafka, redis), console)


async def _start_servers(
    options: UpOptions, resources: AsyncExitStack, stop: StopSignal, console: Console
) -> tuple[ApacheKafka | PackagedKafka, RedisServer]:
    try:
        kafka: ApacheKafka | PackagedKafka
        if options.kafka_home is not None:
            kafka = ApacheKafka(options.kafka_home, port=options.kafka_port or None)
        else:
            kafka = PackagedKafka(port=options.kafka_port or None)
        resources.push_async_callback(_stop_server, kafka, stop)
        redis = RedisServer(port=options.redis_port or None)
        resources.push_async_callback(_stop_server, redis, stop)
        for server in (kafka, redis):
            console.print(f"[dim]starting {server.label} ({server.kind})[/dim]")
            await server.start()
    except LocalServerError as error:
        raise OperatorError(str(error)) from error
    return kafka, redis


async def _stop_server(server: LocalServer, stop: StopSignal) -> None:
    """In order, unless it keeps nothing on disk, never served, or somebody is in a hurry.

    The packaged broker holds everything in memory and would take five seconds to close.
    """
    if isinstance(server, PackagedKafka) or not server.served or stop.forced:
        server.close()
    else:
        await server.stop()


async def _serve(
    app: App,
    stop: StopSignal,
    options: UpOptions,
    servers: tuple[ApacheKafka | PackagedKafka, RedisServer],
    console: Console,
) -> ExitStatus:
    """Run the service beside two watchers; its end ends them."""
    parent = os.getppid() if options.stop_with_parent else None
    problems: list[str] = []
    try:
        async with beside(
            _watch(servers, parent, stop, problems),
            _announce(app, servers, options, stop, problems, console),
        ):
            return await app.run(stop)
    finally:
        if problems:
            raise OperatorError(problems[0])


async def _watch(
    servers: tuple[LocalServer, ...], parent: int | None, stop: StopSignal, problems: list[str]
) -> None:
    """Request the stop when a broker has died or the parent is gone."""
    while not stop.requested:
        for server in servers:
            if (death := server.death()) is not None:
                problems.append(death)
                stop.request(f"{server.label} has died")
                return
        if parent is not None and os.getppid() != parent:
            stop.request("the parent process is gone")
            return
        await asyncio.sleep(_WATCH_S)


async def _announce(
    app: App,
    servers: tuple[ApacheKafka | PackagedKafka, RedisServer],
    options: UpOptions,
    stop: StopSignal,
    problems: list[str],
    console: Console,
) -> None:
    """Once ready: print the addresses, and write the ready file; stop when that cannot be."""
    await app.ready.wait()
    kafka, redis = servers
    for server in servers:
        server.served = True
    addresses = Addresses(
        pid=os.getpid(),
        kafka=kafka.address,
        kafka_kind=kafka.kind,
        redis=redis.url,
        redis_kind=redis.kind,
        health=f"http://{app.settings.health.host}:{app.settings.health.port}",
        models=tuple(app.models),
        max_batch_tokens={name: info.max_batch_tokens for name, info in app.models.items()},
    )
    _print(console, addresses)
    if options.ready_file is not None:
        try:
            await write_ready_file(options.ready_file, addresses)
        except OperatorError as error:
            problems.append(str(error))
            stop.request("the ready file cannot be written")


async def write_ready_file(path: Path, addresses: Addresses) -> None:
    """Whoever sees the file reads all of it; a FIFO waits for its reader. Raises `OperatorError`."""
    with contextlib.suppress(OSError):  # told below
        path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        try:
            opened = WholeFile(path, "--ready-file", waits=False)
            break
        except NoReader:
            await asyncio.sleep(_WATCH_S)
    with opened as file:
        file.write(msgspec.json.encode(addresses))
        file.keep()


def read_ready_file(path: Path) -> Addresses:
    """What `write_ready_file` wrote. Raises `OSError` or `msgspec.MsgspecError`."""
    return msgspec.json.decode(path.read_bytes(), type=Addresses)


def _say_stop(console: Console, action: str) -> None:
    words = {
        "drain": "stopping: finishing what is held; Ctrl-C again to leave at once",
        "force": "leaving at once; what is unfinished is given up",
    }
    if action in words:
        console.print(f"[dim]{words[action]}[/dim]")


_PRODUCER = """\
import asyncio, msgpack
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer

async def main():
    producer = AIOKafkaProducer(bootstrap_servers="{kafka}")
    replies = AIOKafkaConsumer(
        "{reply_topic}", bootstrap_servers="{kafka}", auto_offset_reset="earliest"
    )
    async with producer, replies:
        request = {{"id": "hello-1", "input": ["a text to embed", "and another"]}}
        await producer.send_and_wait("{request_topic}", msgpack.packb(request), key=b"hello-1")
        async for record in replies:
            if record.key == b"hello-1":
                reply = msgpack.unpackb(record.value)
                return print(reply.get("error") or reply["usage"])

asyncio.run(main())"""

_RPC = """\
from embedstream_client import Client

client = Client.from_url("{redis}")
documents = [
    "A dead key on a keyboard changes the next letter.",
    "A deadlock is when two processes wait for each other and neither can go on.",
    "The deadline for the report is on Friday.",
]
for ranked in client.rerank("what is a deadlock?", documents):
    print(f"{{ranked.score:.4f}}  {{ranked.document}}")"""


def snippets(addresses: Addresses) -> dict[str, str]:
    """Code that works as it is: a plain Kafka producer, and a question through the light client."""
    values: dict[str, Any] = msgspec.structs.asdict(addresses)
    return {
        "embed over Kafka (pip install aiokafka msgpack)": _PRODUCER.format(**values),
        "rerank over Redis (pip install 'clients/python[redis]'; other ways: docs/web.md)": _RPC.format(
            **values
        ),
    }


def _print(console: Console, addresses: Addresses) -> None:
    lines = [
        f"Kafka   {addresses.kafka}   ({addresses.kafka_kind}; requests on {addresses.request_topic}, "
        f"replies on {addresses.reply_topic})",
        f"Redis   {addresses.redis}   ({addresses.redis_kind}; requests on {addresses.request_stream})",
        f"Health  {addresses.health}/ready   /live /metrics /statistics",
        f"Models  {', '.join(addresses.models)}",
    ]
    if addresses.kafka_kind == PackagedKafka.kind:
        lines.append(
            "The packaged Kafka broker keeps its data in memory: for trying out, not for keeping."
        )
    console.print(
        Panel("\n".join(lines), title="embedstream is up; Ctrl-C takes all down", expand=False)
    )
    for title, code in snippets(addresses).items():
        console.print(title, style="bold", soft_wrap=True, markup=False, highlight=False)
        # Raw: a line that the console wrapped would be a syntax error once copied.
        console.print(code, soft_wrap=True, markup=False, highlight=False)
