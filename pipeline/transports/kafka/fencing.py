"""Commits inside a transaction that say who commits them, and reads that wait for open transactions.

Who calls it: `transactions.TransactionalSink` fences its producer, `consumer.start_consumer` its reads.
What must stay true: aiokafka sends the first version of both requests, which names no member, so that a
process that was stopped, lost its partitions and went on would commit over their new owner. With these
versions (Kafka 2.5, KIP-447) the group refuses whoever is no member of its present generation, and whoever
gets a partition learns its offset only once every transaction that holds one has ended.
"""

from __future__ import annotations

import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple
from weakref import WeakSet

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.client import CoordinationType
from aiokafka.errors import (
    GroupAuthorizationFailedError,
    GroupLoadInProgressError,
    KafkaError,
    NotCoordinatorForGroupError,
    for_code,
)
from aiokafka.producer.sender import TxnOffsetCommitHandler
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.group import HeartbeatRequest
from aiokafka.protocol.types import (
    Boolean,
    CompactArray,
    CompactString,
    Int16,
    Int32,
    Int64,
    Schema,
    TaggedFields,
)
from aiokafka.structs import OffsetAndMetadata

_TEXT = CompactString("utf-8")
_UNSTABLE = 88  # UNSTABLE_OFFSET_COMMIT
_FENCED_INSTANCE = 82
_UNKNOWN_MEMBER = 25
_REBALANCING = 27
_NO_LONGER_MEMBER = {
    22: "another generation of the group",
    _UNKNOWN_MEMBER: "the group does not know this member",
    _FENCED_INSTANCE: "another process uses this group_instance_id",
}


class NoLongerMember(KafkaError):  # type: ignore[misc]
    """The group has moved on without us. by_name: another process has our `group_instance_id`."""

    def __init__(self, code: int) -> None:
        super().__init__(_NO_LONGER_MEMBER[code])
        self.by_name = code == _FENCED_INSTANCE


class Membership(NamedTuple):
    """Who commits: as of when the partitions were found to be ours."""

    group: str
    generation: int
    member: str
    instance: str | None


class _TxnOffsetCommitResponse(Response):  # type: ignore[misc]
    API_KEY = 28
    API_VERSION = 3
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("topic", _TEXT),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32), ("error_code", Int16), ("tags", TaggedFields)
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _TxnOffsetCommitStruct(RequestStruct):  # type: ignore[misc]
    API_KEY = 28
    API_VERSION = 3
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _TxnOffsetCommitResponse
    SCHEMA = Schema(
        ("transactional_id", _TEXT),
        ("group_id", _TEXT),
        ("producer_id", Int64),
        ("producer_epoch", Int16),
        ("generation_id", Int32),
        ("member_id", _TEXT),
        ("group_instance_id", _TEXT),
        (
            "topics",
            CompactArray(
                ("topic", _TEXT),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        ("metadata", _TEXT),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _TxnOffsetCommit(Request[_TxnOffsetCommitStruct]):  # type: ignore[misc]
    API_KEY = 28

    def __init__(self, *fields: Any) -> None:
        self._fields = fields

    def build(self, request_struct_class: type[_TxnOffsetCommitStruct]) -> Any:
        return request_struct_class(*self._fields)


class _OffsetFetchResponse(Response):  # type: ignore[misc]
    API_KEY = 9
    API_VERSION = 7
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "topics",
            CompactArray(
                ("topic", _TEXT),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("offset", Int64),
                        ("leader_epoch", Int32),
                        ("metadata", _TEXT),
                        ("error_code", Int16),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("error_code", Int16),
        ("tags", TaggedFields),
    )


class _OffsetFetchStruct(RequestStruct):  # type: ignore[misc]
    API_KEY = 9
    API_VERSION = 7
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _OffsetFetchResponse
    SCHEMA = Schema(
        ("group_id", _TEXT),
        (
            "topics",
            CompactArray(
                ("topic", _TEXT), ("partitions", CompactArray(Int32)), ("tags", TaggedFields)
            ),
        ),
        ("require_stable", Boolean),
        ("tags", TaggedFields),
    )


class _StableOffsetFetch(Request[_OffsetFetchStruct]):  # type: ignore[misc]
    API_KEY = 9

    def __init__(self, *fields: Any) -> None:
        self._fields = fields

    def build(self, request_struct_class: type[_OffsetFetchStruct]) -> Any:
        return request_struct_class(*self._fields)


class _FencedHandler(TxnOffsetCommitHandler):  # type: ignore[misc]
    """aiokafka's, but for the version of its request and three more answers."""

    def __init__(self, sender: Any, offsets: Any, membership: Membership) -> None:
        super().__init__(sender, offsets, membership.group)
        self._membership = membership

    def create_request(self) -> _TxnOffsetCommit:
        transaction = self._sender._txn_manager
        topics: dict[str, list[tuple[Any, ...]]] = defaultdict(list)
        for place, commit in sorted(self._offsets.items()):
            row: tuple[Any, ...] = (place.partition, commit.offset, -1, commit.metadata, {})
            topics[place.topic].append(row)
        return _TxnOffsetCommit(
            transaction.transactional_id,
            self._membership.group,
            transaction.producer_id,
            transaction.producer_epoch,
            self._membership.generation,
            self._membership.member,
            self._membership.instance,
            [(topic, partitions, {}) for topic, partitions in topics.items()],
            {},
        )

    def handle_response(self, response: Any) -> Any:
        errors = [
            (topic, [(partition, code) for partition, code, _ in partitions])
            for topic, partitions, _ in response.topics
        ]
        codes = {code for _, partitions in errors for _, code in partitions}
        for code in codes & _NO_LONGER_MEMBER.keys():
            self._sender._txn_manager.error_transaction(NoLongerMember(code))
            return None
        return super().handle_response(SimpleNamespace(errors=errors))


def fence(producer: AIOKafkaProducer, membership: Membership) -> None:
    """Offsets that this producer commits from now on are those of this member."""
    sender = producer._sender

    async def commit(offsets: Any, group: str) -> None:
        if not offsets:
            return
        try:
            node = await sender._find_coordinator(CoordinationType.GROUP, group)
        except GroupAuthorizationFailedError as error:
            sender._txn_manager.error_transaction(error)
            return
        await _FencedHandler(sender, offsets, membership).do(node)

    sender._do_txn_offset_commit = commit


def supports_fencing(producer: AIOKafkaProducer) -> bool:
    """Do the brokers that this started producer talks to know both requests?"""
    needed = (_TxnOffsetCommitStruct, _OffsetFetchStruct)
    return all(
        connection._versions.get(one.API_KEY, (0, 0))[1] >= one.API_VERSION
        for connection in producer.client._conns.values()
        for one in needed
    )


def membership_of(consumer: AIOKafkaConsumer, group: str, instance: str | None) -> Membership:
    """Who we are in the group now."""
    coordinator = consumer._coordinator
    return Membership(group, coordinator.generation, coordinator.member_id, instance)


class Fenced(Exception):
    """Another process runs under our name: it has our work, and we must not go on."""

    def __init__(self, group: str, instance: str | None) -> None:
        super().__init__(
            f"another process runs as group_instance_id {instance} of group {group}: give each process a "
            "name of its own"
        )


_with_namesake: WeakSet[AIOKafkaConsumer] = WeakSet()


def has_namesake(consumer: AIOKafkaConsumer) -> bool:
    """Has another process joined under this static member's name?"""
    return consumer in _with_namesake


def watch_for_namesake(consumer: AIOKafkaConsumer, session_s: float) -> None:
    """Note when the group does not know this started static member, which it heard within its session.

    aiokafka would join again, and put the other one out, who would do the same: five times a second,
    with no work done. So it is not told; its heart-beats fail until somebody acts on `has_namesake`.
    """
    coordinator = consumer._coordinator
    send, heard_at = coordinator._send_req, time.monotonic()

    async def watched(request: Any) -> Any:
        nonlocal heard_at
        response = await send(request)
        code = getattr(response, "error_code", 0)
        if code == _UNKNOWN_MEMBER and isinstance(request, HeartbeatRequest):
            if time.monotonic() - heard_at < session_s:
                _with_namesake.add(consumer)
                raise NoLongerMember(_FENCED_INSTANCE)
        elif code == 0 or code == _REBALANCING:
            heard_at = time.monotonic()
        return response

    coordinator._send_req = watched


def read_stable_offsets(consumer: AIOKafkaConsumer) -> None:
    """Wherever this started consumer looks up committed offsets, it waits for open transactions."""
    coordinator = consumer._coordinator
    as_ever = coordinator._do_fetch_commit_offsets

    async def fetch(partitions: list[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata]:
        topics: dict[str, list[int]] = defaultdict(list)
        for place in partitions:
            topics[place.topic].append(place.partition)
        wanted: list[tuple[Any, ...]] = [(topic, numbers, {}) for topic, numbers in topics.items()]
        request = _StableOffsetFetch(coordinator.group_id, wanted, True, {})
        try:
            response = await coordinator._send_req(request)
        except NotImplementedError:  # an older broker; nobody commits in transactions there
            found: dict[TopicPartition, OffsetAndMetadata] = await as_ever(partitions)
            return found
        return _stable(coordinator, response)

    coordinator._do_fetch_commit_offsets = fetch


def _stable(coordinator: Any, response: Any) -> dict[TopicPartition, OffsetAndMetadata]:
    """The answer, or a retriable error: aiokafka asks again then."""
    found = {}
    rows = [(topic, *row[:5]) for topic, partitions, _ in response.topics for row in partitions]
    for code in {response.error_code, *(row[-1] for row in rows)} - {0}:
        error = for_code(code)
        if code == _UNSTABLE:
            raise GroupLoadInProgressError("a transaction with offsets of this group is open")
        if error is NotCoordinatorForGroupError:
            coordinator.coordinator_dead()
        raise error()
    for topic, partition, offset, _, metadata, _ in rows:
        if offset >= 0:
            found[TopicPartition(topic, partition)] = OffsetAndMetadata(offset, metadata)
    return found
