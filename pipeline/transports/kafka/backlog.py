"""How far a group is behind the ends of the topics that it reads.

Who calls it: the registry, for `embedstream index status`.
What must stay true: it asks and changes nothing: no group is joined, no topic made by asking for it.
"""

from __future__ import annotations

import asyncio

from aiokafka import TopicPartition
from aiokafka.errors import KafkaError

from pipeline.transports.backlog import Backlog
from pipeline.transports.kafka.admin import admin_of, request_topics, words
from pipeline.transports.kafka.consumer import start_consumer, stop_consumer
from pipeline.transports.kafka.options import KafkaOptions


async def read_backlog(options: KafkaOptions) -> tuple[Backlog, ...]:
    """See `registry.read_backlog`."""
    try:
        async with asyncio.timeout(options.open_timeout_s):
            async with admin_of(options) as admin:
                named = await request_topics(options, admin)
                missing = sorted(set(named) - set(await admin.list_topics()))
                if missing or not named:
                    what = ", ".join(missing) or f"that matches {options.pattern}"
                    raise ConnectionError(f"there is no topic {what} at {options.bootstrap}")
                places = [
                    TopicPartition(one["topic"], part["partition"])
                    for one in await admin.describe_topics(list(named))
                    for part in one["partitions"]
                ]
                settled = await admin.list_consumer_group_offsets(options.group, partitions=places)
            consumer = await start_consumer(options, options.max_partition_fetch_bytes, alone=True)
            try:
                begins = await consumer.beginning_offsets(places)
                ends = await consumer.end_offsets(places)
            finally:
                await stop_consumer(consumer, options.close_timeout_s)
    except (KafkaError, TimeoutError) as error:
        raise ConnectionError(
            f"Kafka at {options.bootstrap} does not tell how far the group {options.group} is "
            f"({words(error)}): check the rights of this client, or raise open_timeout_s"
        ) from None
    return tuple(
        Backlog(
            source=f"{place.topic}/{place.partition}",
            begin=begins[place],
            end=ends[place],
            settled=settled[place].offset if settled[place].offset >= 0 else None,
        )
        for place in sorted(places)
    )
