"""An admin client of a Kafka cluster, closed in bounded time, and errors an operator can act on.

Who calls it: everything in this folder that asks a cluster.
What must stay true: every failure to reach the cluster becomes a `ConnectionError` of one line that
names the address and the remedy; nothing that was opened here stays open.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Awaitable, Sequence
from typing import Any

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.conn import create_conn
from aiokafka.errors import KafkaError

from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.kafka.security import client_settings, what_to_check

REACH_S = 3.0
"""Per advertised address, and per question at open."""


def words(error: BaseException) -> str:
    """Kind and text of an error, the kind once."""
    name, text = type(error).__name__, " ".join(str(error).split())
    return text if name in text else f"{name} {text}".rstrip()


async def closed_in_time(closing: Awaitable[Any], bound_s: float) -> bool:
    """Await one of aiokafka's close calls; False when it failed or took longer than `bound_s`."""
    try:
        async with asyncio.timeout(bound_s):
            try:
                await closing
            except asyncio.CancelledError:
                # aiokafka awaits tasks that it has just cancelled itself; that is not our end.
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                return False
    except (KafkaError, TimeoutError):
        return False
    return True


@contextlib.asynccontextmanager
async def admin_of(options: KafkaOptions) -> AsyncIterator[AIOKafkaAdminClient]:
    """Connected while the block runs. Raises `ConnectionError` with the cause and the remedy."""
    admin = AIOKafkaAdminClient(**client_settings(options))
    try:
        try:
            await admin.start()
        except KafkaError as error:
            raise ConnectionError(await _why_unreachable(options, error)) from None
        yield admin
    finally:
        await closed_in_time(admin._client.close(), options.close_timeout_s)


async def _why_unreachable(options: KafkaOptions, error: KafkaError) -> str:
    """The cause that aiokafka only logs: connect to each bootstrap address once more, by hand."""
    causes = []
    settings = client_settings(options)
    for address in options.bootstrap.split(","):
        host, _, port = address.rpartition(":")
        try:
            connection = await create_conn(
                host.strip("[]"),
                int(port),
                client_id=options.client_id,
                request_timeout_ms=int(REACH_S * 1000),
                security_protocol=options.security_protocol,
                ssl_context=settings.get("ssl_context"),
                **{name: settings[name] for name in settings if name.startswith("sasl_")},
            )
        except (KafkaError, OSError, TimeoutError) as cause:
            causes.append(f"{address}: {words(cause)}")
        else:
            connection.close()
    detail = "; ".join(causes) or str(error)
    remedy = "check that the broker runs and that the address is right"
    if options.security_protocol != "PLAINTEXT":
        remedy = what_to_check(options)
    return f"Kafka at {options.bootstrap} cannot be used ({detail}): {remedy}"


async def config_of(
    admin: AIOKafkaAdminClient, kind: ConfigResourceType, names: Sequence[str], entry: str
) -> list[str]:
    """Values of one configuration entry; brokers may keep it to themselves."""
    resources = [ConfigResource(kind, name, configs={entry: None}) for name in names]
    try:
        async with asyncio.timeout(REACH_S):
            answers = await admin.describe_configs(resources)
    except (KafkaError, TimeoutError):
        return []
    return [
        found[1]
        for answer in answers
        for code, _, _, _, entries in answer.resources
        for found in entries
        if code == 0 and found[0] == entry and found[1]
    ]


async def request_topics(options: KafkaOptions, admin: AIOKafkaAdminClient) -> tuple[str, ...]:
    """Those that are read: as the options name them, or of those that exist all that match."""
    if options.pattern is None:
        return options.topics
    found = await admin.describe_topics()
    names = sorted(one["topic"] for one in found if not one["is_internal"])
    return tuple(name for name in names if re.match(options.whole_pattern, name))
