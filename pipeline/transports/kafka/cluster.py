"""What a Kafka cluster is like, looked up once: topics, limits, idempotence, where the group begins.

Who calls it: the source, the sink and the asker.
What must stay true: every failure to reach the cluster becomes a `ConnectionError` of one line that
names the address and the remedy; nothing that was opened here stays open.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog
from aiokafka import TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    KafkaError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
    for_code,
)
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.transaction import InitProducerIdRequest

from pipeline.transports.kafka.admin import REACH_S, admin_of, config_of, request_topics, words
from pipeline.transports.kafka.limits import compare_limits, message_limit
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.kafka.schema_registry import reach_registry

log = structlog.get_logger(__name__)

_PID_RETRY_S = 0.1
_BEYOND = 2**62
"""An offset that no partition has reached."""


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What was found at open.

    idempotent         the cluster hands out producer ids
    max_message_bytes  smallest known `max.message.bytes` of reply and dead-letter topic
    notices            one line each, for the log and `embedstream check`
    broker_creates     a topic that is asked for is made (`auto.create.topics.enable`); None: not told
    partition_counts   partitions by request topic
    group_topics       request topics of which the group had committed offsets
    """

    idempotent: bool
    max_message_bytes: int | None
    notices: tuple[str, ...]
    broker_creates: bool | None = None
    partition_counts: Mapping[str, int] = field(default_factory=dict)
    group_topics: frozenset[str] = frozenset()
    latest: bool = False
    by_pattern: bool = False

    def appeared_since(self, topic: str, partition: int) -> bool:
        """True when the group lived before this partition did, so that nobody chose to skip it.

        What it holds is then read from its start although `auto_offset_reset` is `latest`, unless
        the group has committed an offset of it, which the caller asks for.
        """
        if not self.latest:
            return False
        lived = bool(self.group_topics) if self.by_pattern else topic in self.group_topics
        return lived or partition >= self.partition_counts.get(topic, 0)


async def survey(
    options: KafkaOptions, *, consumes: bool = True, tells_missing: bool = True
) -> ClusterFacts:
    """Connect once, look up the group where one `consumes`, create missing topics, read limits, and probe for idempotence.

    Args:
        tells_missing: a notice for each topic that does not exist and is not to be created.

    Raises `ConnectionError` when the cluster cannot be used as configured.
    """
    notices: list[str] = []
    if consumes:
        await reach_registry(options)
    try:
        async with asyncio.timeout(options.open_timeout_s), admin_of(options) as admin:
            await _check_advertised(options, admin, notices)
            topics = await request_topics(options, admin) if consumes else ()
            if consumes and not topics:
                notices.append(_no_match(options))
            if options.auto_create or tells_missing:
                await _ensure_topics(options, admin, notices)
            limit = await message_limit(options, admin)
            idempotent = await _supports_idempotence(options, admin, notices)
            creates = await _broker_creates(admin)
            counts, known = await _starts(options, admin, topics)
            if topics:
                await compare_limits(options, admin, topics, notices)
    except TimeoutError:
        raise ConnectionError(
            f"Kafka at {options.bootstrap} gave no complete answer within open_timeout_s "
            f"({options.open_timeout_s:g} s): check that the broker is up, or raise open_timeout_s"
        ) from None
    except KafkaError as error:
        raise ConnectionError(_why_refused(options, error)) from None
    for notice in notices:
        log.warning("kafka_notice", notice=notice, bootstrap=options.bootstrap)
    latest, by_pattern = options.auto_offset_reset == "latest", options.pattern is not None
    return ClusterFacts(
        idempotent, limit, tuple(notices), creates, counts, known, latest, by_pattern
    )


def _no_match(options: KafkaOptions) -> str:
    return (
        f"no topic that this client sees matches the pattern {options.pattern} now: one that appears is read "
        f"within metadata_max_age_ms ({options.metadata_max_age_ms})"
    )


def _why_refused(options: KafkaOptions, error: KafkaError) -> str:
    text = f"Kafka at {options.bootstrap} refused: {words(error)}"
    if isinstance(error, GroupAuthorizationFailedError):
        text += f": give this client READ on the group {options.group}, or name another group"
    elif isinstance(error, TopicAuthorizationFailedError):
        text += f": give this client READ on {', '.join(options.topics) or options.pattern}"
    return text


async def _check_advertised(
    options: KafkaOptions, admin: AIOKafkaAdminClient, notices: list[str]
) -> None:
    """Clients talk to the addresses that brokers advertise, not to the bootstrap address."""
    # What the bootstrap connection was told; asking again would use the address in question.
    brokers = list(admin._client.cluster.brokers())
    unreachable: list[str] = []
    for broker in brokers:
        host, port = broker.host, broker.port
        try:
            async with asyncio.timeout(REACH_S):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
        except (OSError, TimeoutError) as error:
            unreachable.append(f"{host}:{port} ({type(error).__name__})")
    if not unreachable:
        return
    text = (
        f"Kafka at {options.bootstrap} answers, but the address it advertises, "
        f"{', '.join(unreachable)}, cannot be reached from here: set advertised.listeners of the "
        "broker to an address that this machine reaches (inside a container it is not localhost)"
    )
    if len(unreachable) == len(brokers):
        raise ConnectionError(text)
    notices.append(text)


async def _ensure_topics(
    options: KafkaOptions, admin: AIOKafkaAdminClient, notices: list[str]
) -> None:
    needed = [*options.topics, options.reply_topic, options.dead_letter_topic]
    existing = set(await admin.list_topics())
    missing = [topic for topic in dict.fromkeys(needed) if topic not in existing]
    if not missing:
        return
    if not options.auto_create:
        for topic in missing:
            role = "request" if topic in options.topics else "reply"
            role = "dead-letter" if topic == options.dead_letter_topic else role
            role = "reply" if topic == options.reply_topic else role
            notices.append(
                f"{role} topic {topic} does not exist: create it, or set auto_create=true "
                "(it is used as soon as it exists)"
            )
        return
    answer = await admin.create_topics(
        [
            NewTopic(
                name=topic,
                num_partitions=options.partitions,
                replication_factor=options.replication_factor,
            )
            for topic in missing
        ]
    )
    for topic, code, *rest in answer.topic_errors:
        error = for_code(code)
        if code and error is not TopicAlreadyExistsError:
            reason = (rest[0] if rest else None) or error.__name__
            notices.append(f"topic {topic} does not exist and could not be created: {reason}")


async def _starts(
    options: KafkaOptions, admin: AIOKafkaAdminClient, topics: Sequence[str]
) -> tuple[dict[str, int], frozenset[str]]:
    """Partitions of the request topics, and those topics of which the group has an offset.

    Asked for in any case: a group or topic that this client may not use shows at once.
    """
    if not topics:
        return {}, frozenset()
    existing = set(await admin.list_topics())  # asking for others by name would make them
    described = await admin.describe_topics([t for t in topics if t in existing])
    counts = {one["topic"]: len(one["partitions"]) for one in described if not one["error_code"]}
    places = [TopicPartition(topic, n) for topic, count in counts.items() for n in range(count)]
    if not places:
        return counts, frozenset()
    for topic in described:
        await _may_read(admin, topic)
    while True:  # a broker that has just started loads its coordinator first
        try:
            found = await admin.list_consumer_group_offsets(options.group, partitions=places)
        except KafkaError as error:
            if not error.retriable:
                raise
            await asyncio.sleep(_PID_RETRY_S)
        else:
            return counts, frozenset(p.topic for p, o in found.items() if o.offset >= 0)


async def _may_read(admin: AIOKafkaAdminClient, described: Mapping[str, Any]) -> None:
    """Raises `TopicAuthorizationFailedError`: a topic that one may look up, one may not yet read."""
    leaders = [one["leader"] for one in described["partitions"] if one["partition"] == 0]
    for leader in leaders:
        # Far behind the end: nothing is sent, only whether it might be.
        beyond = [(described["topic"], [(0, _BEYOND, 1)])]
        with contextlib.suppress(KafkaError, TimeoutError):
            async with asyncio.timeout(REACH_S):
                answer = await admin._send_request(FetchRequest(0, 0, 1, 0, beyond), leader)
            codes = [part[1] for _, parts in answer.topics for part in parts]
            if TopicAuthorizationFailedError.errno in codes:
                break
    else:
        return
    raise TopicAuthorizationFailedError(described["topic"])


async def _broker_creates(admin: AIOKafkaAdminClient) -> bool | None:
    brokers = [str(broker.nodeId) for broker in admin._client.cluster.brokers()][:1]
    name = "auto.create.topics.enable"
    found = await config_of(admin, ConfigResourceType.BROKER, brokers, name)
    return found[0] == "true" if found else None


async def _supports_idempotence(
    options: KafkaOptions, admin: AIOKafkaAdminClient, notices: list[str]
) -> bool:
    if options.idempotent is False:
        return False
    reason = "no answer"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(REACH_S):
            while True:  # a broker that has just started loads its coordinator first
                try:
                    answer = await admin._send_request(InitProducerIdRequest(None, 60_000))
                except KafkaError as error:
                    reason = type(error).__name__
                    break
                error_type = for_code(answer.error_code)
                reason = "" if answer.error_code == 0 else error_type.__name__
                if not reason or not error_type.retriable:
                    break
                await asyncio.sleep(_PID_RETRY_S)
    if not reason:
        return True
    if options.idempotent is True:
        raise ConnectionError(
            f"Kafka at {options.bootstrap} hands out no producer ids ({reason}): "
            "set idempotent=auto or idempotent=false"
        )
    notices.append(
        f"the broker hands out no producer ids ({reason}): replies are sent without idempotence, "
        "a retry inside the client may write one twice"
    )
    return False
