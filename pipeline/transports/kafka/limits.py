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

from pipeline.transports.kafka.admin import REACH_S, admin_of, config_of, request_topics
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.options import Accepts

_SMALLEST_PART_BYTES = 1024 + 1024 + 512
"""Framing, headers and the smallest part of a reply: see `sink` and `actors.publish`."""
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


async def against(options: KafkaOptions, accepts: Accepts) -> tuple[str, ...]:
    """What this service takes and gives that the topics of a route do not, or the other way round."""
    try:
        async with asyncio.timeout(REACH_S), admin_of(options) as admin:
            requests = await _takes(admin, await request_topics(options, admin))
            replies = await _takes(admin, [options.reply_topic])
    except (ConnectionError, KafkaError, TimeoutError):
        return ()  # whoever reaches the cluster says why
    found = []
    for topic, limit in requests.items():
        if accepts.record_bytes < limit * _SAME_SIZE:
            found.append(
                f"request topic {topic} takes records of {limit} bytes (max.message.bytes), and this route "
                f"{accepts.record_bytes} (limits.max_record_bytes): a larger one is answered with "
                "record_too_large; raise the limit or lower that of the topic"
            )
        elif accepts.record_was_set and limit < accepts.record_bytes * _SAME_SIZE:
            found.append(
                f"limits.max_record_bytes is {accepts.record_bytes}, and request topic {topic} takes {limit} "
                "(max.message.bytes): no larger request can arrive; raise the topic's or lower the limit"
            )
    needs = accepts.smallest_reply_bytes + _SMALLEST_PART_BYTES
    bounds = {f"max_request_size ({options.max_request_size})": options.max_request_size}
    bounds |= {f"max.message.bytes of {t} ({limit})": limit for t, limit in replies.items()}
    tight = [name for name, limit in bounds.items() if limit < needs]
    if tight:
        found.append(
            f"a reply repeats up to {accepts.smallest_reply_bytes} bytes of its request (limits.max_metadata_bytes "
            f"and limits.max_id_bytes) and needs {needs}, more than {' and '.join(tight)}: such a request "
            "can only be answered with a failure; raise the one or lower the limits"
        )
    return tuple(found)


async def _takes(admin: AIOKafkaAdminClient, topics: Sequence[str]) -> dict[str, int]:
    """Topic -> its `max.message.bytes`, where the broker tells."""
    found = {}
    for topic in topics:
        for value in await config_of(admin, ConfigResourceType.TOPIC, [topic], "max.message.bytes"):
            found[topic] = int(value)
    return found


async def message_limit(options: KafkaOptions, admin: AIOKafkaAdminClient) -> int | None:
    """The smallest `max.message.bytes` of the topics we write; None where brokers do not tell."""
    topics = [options.reply_topic, options.dead_letter_topic]
    found = await config_of(admin, ConfigResourceType.TOPIC, topics, "max.message.bytes")
    return min((int(value) for value in found), default=None)
