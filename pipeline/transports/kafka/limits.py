"""How large a record may be: topics, brokers, this client and this service compared.

Who calls it: `cluster.survey` at open, the sink when a topic refuses a record.
What must stay true: what a broker does not tell is not guessed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.errors import KafkaError

from pipeline.transports.kafka.admin import REACH_S, admin_of, config_of
from pipeline.transports.kafka.options import KafkaOptions

_SAME_SIZE = 0.99
"""Kafka's own default is 12 bytes above that of its clients."""


async def topic_limit(options: KafkaOptions, topic: str) -> int | None:
    """`max.message.bytes` of a topic as it is now; None where the broker does not tell."""
    try:
        async with asyncio.timeout(REACH_S), admin_of(options) as admin:
            found = await config_of(admin, ConfigResourceType.TOPIC, [topic], "max.message.bytes")
    except (ConnectionError, KafkaError, TimeoutError):
        return None
    return min((int(value) for value in found), default=None)


async def compare_limits(
    options: KafkaOptions, admin: AIOKafkaAdminClient, topics: Sequence[str], notices: list[str]
) -> None:
    """A dead letter is the whole record only where it fits: into its topic, and through our producer."""

    async def takes(topics: Sequence[str]) -> list[int]:
        found = await config_of(admin, ConfigResourceType.TOPIC, topics, "max.message.bytes")
        return [int(value) for value in found]

    largest = max(await takes(topics), default=0)
    bounds = {f"max_request_size ({options.max_request_size})": options.max_request_size}
    for limit in await takes([options.dead_letter_topic]):
        bounds[f"max.message.bytes of {options.dead_letter_topic} ({limit})"] = limit
    tight = [name for name, limit in bounds.items() if limit < largest * _SAME_SIZE]
    if tight:
        notices.append(
            f"the request topics take records of {largest} bytes, more than {' and '.join(tight)}: a dead letter "
            "of a larger record holds its beginning only, and cannot be sent again; raise the one or lower "
            "the other"
        )


async def message_limit(options: KafkaOptions, admin: AIOKafkaAdminClient) -> int | None:
    """The smallest `max.message.bytes` of the topics we write; None where brokers do not tell."""
    topics = [options.reply_topic, options.dead_letter_topic]
    found = await config_of(admin, ConfigResourceType.TOPIC, topics, "max.message.bytes")
    return min((int(value) for value in found), default=None)
