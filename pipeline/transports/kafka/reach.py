"""What `embedstream check` tries on a Kafka cluster: everything that `serve` needs, without a trace.

Who calls it: the registry.
What must stay true: nothing is written, made or joined. A right is asked for with a request that names
a partition no topic has, or a member no group has: a broker looks at the rights first. A topic is made
with "validate only", and only where the broker was seen to answer such questions as Apache Kafka does
(the packaged one would make it).
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiokafka import codec
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.admin.config_resource import ConfigResourceType
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    KafkaError,
    TopicAuthorizationFailedError,
    TransactionalIdAuthorizationFailed,
    UnknownTopicOrPartitionError,
    for_code,
)
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.group import HeartbeatRequest
from aiokafka.protocol.produce import ProduceRequest
from aiokafka.protocol.transaction import EndTxnRequest

from pipeline.transports.kafka import cluster
from pipeline.transports.kafka.admin import admin_of, config_of, request_topics, words
from pipeline.transports.kafka.options import MAX_INT32, KafkaOptions

_NO_PARTITION = MAX_INT32
_ANSWER_S = 2.0
_RETRY_S = 0.1
_KNOWS_RIGHTS = (UnknownTopicOrPartitionError, TopicAuthorizationFailedError)


async def reach(
    options: KafkaOptions, *, place: str | None = None, exactly_once: bool = False
) -> tuple[str, ...]:
    """As `registry.reach`: one line for each thing that works but should be looked at.

    Args:
        place: a topic that is only written; None: all that a source and the sink beside it use.
        exactly_once: transactions, too.

    Raises:
        ConnectionError: the cluster, a right or a codec is missing; one line.
    """
    consumes = place is None
    if problem := _codec_problem(options):
        raise ConnectionError(problem)
    looking = msgspec.structs.replace(options, auto_create=False)
    facts = await cluster.survey(looking, consumes=consumes, tells_missing=False)
    try:
        async with admin_of(options) as admin:
            topics = list(await request_topics(options, admin)) if consumes else []
            missing = await _missing(options, admin, topics)
            problems, notices = await _topics(options, admin, missing)
            problems += await _rights(options, admin, topics, consumes, exactly_once)
    except KafkaError as error:
        raise ConnectionError(f"Kafka at {options.bootstrap}: {words(error)}") from None
    if problems:
        raise ConnectionError(f"Kafka at {options.bootstrap}: {'; '.join(problems)}")
    if consumes and options.pattern is not None and topics:
        notices.append(f"the pattern {options.pattern} matches now: {', '.join(topics)}")
    return (*facts.notices, *notices)


def _codec_problem(options: KafkaOptions) -> str | None:
    name = options.compression
    if name == "none" or getattr(codec, f"has_{name}")():
        return None
    return f"compression {name}: its codec is not installed: pip install 'aiokafka[{name}]'"


async def _missing(
    options: KafkaOptions, admin: AIOKafkaAdminClient, topics: list[str]
) -> dict[str, str]:
    """Topic that this client does not see -> what it is for."""
    roles = dict.fromkeys(topics, "request")
    roles[options.reply_topic] = "reply"
    roles.setdefault(options.dead_letter_topic, "dead-letter")  # a destination's is its reply topic
    seen = set(await admin.list_topics())
    return {topic: role for topic, role in roles.items() if topic not in seen}


async def _topics(
    options: KafkaOptions, admin: AIOKafkaAdminClient, missing: dict[str, str]
) -> tuple[list[str], list[str]]:
    """(problems, notices) about topics that are not there."""
    if not missing:
        return [], []
    if not options.auto_create:
        also = await _what_the_broker_makes(admin)
        return [], [
            f"{_not_there(missing)}: create what is missing, or set auto_create=true "
            f"(it is used as soon as it exists){also}"
        ]
    would = (
        f"{_plural(options.partitions, 'partition')} and replication factor "
        f"{options.replication_factor}"
    )
    refusals = await _would_refuse(options, admin, list(missing))
    problems = [
        f"{_not_there({t: missing[t] for t, r in refusals.items() if r == reason})} and cannot be made "
        f"with {would} ({reason}): create what is missing, or change partitions or replication_factor"
        for reason in dict.fromkeys(refusals.values())
    ]
    makeable = {topic: role for topic, role in missing.items() if topic not in refusals}
    if not makeable:
        return problems, []
    return problems, [
        f"{_not_there(makeable)}: serve will make what is missing with {would}"
        + _one_copy(options, admin)
    ]


def _not_there(topics: dict[str, str]) -> str:
    """``request topic a and reply topic b do not exist``."""
    *others, last = [f"{role} topic {topic}" for topic, role in topics.items()]
    if not others:
        return f"{last} does not exist"
    return f"{', '.join(others)} and {last} do not exist"


def _plural(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _one_copy(options: KafkaOptions, admin: AIOKafkaAdminClient) -> str:
    n_brokers = len(admin._client.cluster.brokers())
    if options.replication_factor > 1 or n_brokers == 1:
        return ""
    return (
        f" (one copy on a cluster of {n_brokers} brokers is lost with its broker: "
        f"set replication_factor={min(3, n_brokers)})"
    )


async def _what_the_broker_makes(admin: AIOKafkaAdminClient) -> str:
    brokers = [str(broker.nodeId) for broker in admin._client.cluster.brokers()][:1]
    found = [
        await config_of(admin, ConfigResourceType.BROKER, brokers, name)
        for name in ("auto.create.topics.enable", "num.partitions", "default.replication.factor")
    ]
    if not all(found) or found[0][0] != "true":
        return ""
    return (
        f"; the broker makes topics that are asked for, with num.partitions {found[1][0]} and "
        f"default.replication.factor {found[2][0]}"
    )


async def _would_refuse(
    options: KafkaOptions, admin: AIOKafkaAdminClient, topics: list[str]
) -> dict[str, str]:
    """Topic -> why the cluster would not make it, as far as it can be asked."""
    n_brokers = len(admin._client.cluster.brokers())
    if options.replication_factor > n_brokers:
        return dict.fromkeys(topics, f"the cluster has {_plural(n_brokers, 'broker')}")
    if await _write_error(admin, topics[0]) not in _KNOWS_RIGHTS:
        return {}
    made = [
        NewTopic(
            name=topic,
            num_partitions=options.partitions,
            replication_factor=options.replication_factor,
        )
        for topic in topics
    ]
    answer = await admin.create_topics(made, validate_only=True)
    return {
        topic: (rest[0] if rest else None) or for_code(code).__name__
        for topic, code, *rest in answer.topic_errors
        if code
    }


async def _rights(
    options: KafkaOptions,
    admin: AIOKafkaAdminClient,
    topics: list[str],
    consumes: bool,
    exactly_once: bool,
) -> list[str]:
    """Which rights this client lacks; empty where the broker does not say."""
    reads = [(f"READ on the topic {topic}", _read_error, topic) for topic in topics]
    writes = dict.fromkeys((options.reply_topic, options.dead_letter_topic))
    questions = reads + [(f"WRITE on the topic {topic}", _write_error, topic) for topic in writes]
    lacks = [
        right
        for right, error_of, topic in questions
        if await error_of(admin, topic) is TopicAuthorizationFailedError
    ]
    if consumes and await _member_error(options, admin) is GroupAuthorizationFailedError:
        lacks.append(f"READ on the group {options.group}")
    if exactly_once:
        name = f"{options.group}.{options.group_instance_id or 'check'}"
        # Of a producer that no transaction has: the right is looked at first.
        answer = await _answer(admin, EndTxnRequest(name, 0, 0, False))
        if answer is not None and for_code(answer.error_code) is TransactionalIdAuthorizationFailed:
            lacks.append(f"WRITE on transactional ids that begin with {options.group}.")
    return [f"this client lacks {' and '.join(lacks)}: grant it"] if lacks else []


async def _write_error(admin: AIOKafkaAdminClient, topic: str) -> type[KafkaError] | None:
    """What an empty write to a partition that is not there is refused with."""
    request = ProduceRequest(None, 1, 1000, [(topic, [(_NO_PARTITION, b"")])])
    return _first_error(await _answer(admin, request))


async def _read_error(admin: AIOKafkaAdminClient, topic: str) -> type[KafkaError] | None:
    """What a read of a partition that is not there is refused with."""
    request = FetchRequest(0, 0, 1, 0, [(topic, [(_NO_PARTITION, 0, 1)])])
    return _first_error(await _answer(admin, request))


def _first_error(answer: Any) -> type[KafkaError] | None:
    for _, partitions in getattr(answer, "topics", ()):
        for _, code, *_ in partitions:
            error: type[KafkaError] = for_code(code)
            return error
    return None


async def _answer(admin: AIOKafkaAdminClient, request: Any, node: int | None = None) -> Any:
    """The broker's answer; None where it gives none to such a question."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            return await admin._send_request(request, node)
    except (KafkaError, TimeoutError):
        return None


async def _member_error(
    options: KafkaOptions, admin: AIOKafkaAdminClient
) -> type[KafkaError] | None:
    """What a sign of life of a member that does not exist is refused with."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            while True:  # a broker that has just started loads its coordinator first
                try:
                    node = await admin.find_coordinator(options.group)
                except KafkaError as error:
                    if not error.retriable:
                        return type(error)
                    await asyncio.sleep(_RETRY_S)
                else:
                    break
    except TimeoutError:
        return None
    answer = await _answer(admin, HeartbeatRequest(options.group, 0, "check"), node)
    return None if answer is None else for_code(answer.error_code)
