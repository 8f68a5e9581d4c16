"""A cluster of three nodes loses the leader of a request partition, with SIGKILL, under load."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError

from pipeline.local.kafka import ApacheKafka
from pipeline.local.server import free_port
from schemas.results import Reply
from tests.support.kafka_bench import Bench, check_vectors, collect, collect_some, requests
from tests.support.processes import service_process
from tests.support.servers import new_apache

pytestmark = [pytest.mark.kafka, pytest.mark.real_kafka, pytest.mark.timeout(180)]

NODES = 3


@pytest.fixture
async def cluster() -> AsyncIterator[list[ApacheKafka]]:
    """Three brokers and controllers; two of three must have a record before it is acknowledged."""
    nodes = [new_apache(port=free_port()) for _ in range(NODES)]
    voters = ",".join(f"{i + 1}@{one.host}:{one.controller_port}" for i, one in enumerate(nodes))
    for number, node in enumerate(nodes, 1):
        node.properties |= {
            "node.id": str(number),
            "controller.quorum.voters": voters,
            "offsets.topic.replication.factor": "3",
            "transaction.state.log.replication.factor": "3",
            "transaction.state.log.min.isr": "2",
            "default.replication.factor": "3",
            "min.insync.replicas": "2",
            "auto.create.topics.enable": "false",
        }
    try:
        async with asyncio.TaskGroup() as group:  # none is ready before two are
            for node in nodes:
                group.create_task(node.start())
        yield nodes
    finally:
        for node in nodes:
            node.close()


async def make_topics(bench: Bench, partitions: int) -> None:
    """With three replicas, once all brokers have joined."""
    names = (bench.topic, bench.replies, bench.dead_letters)
    admin = AIOKafkaAdminClient(bootstrap_servers=bench.address)
    await admin.start()
    try:
        while len(admin._client.cluster.brokers()) < NODES:
            await admin._client.force_metadata_update()
        answer = await admin.create_topics([NewTopic(name, partitions, 3) for name in names])
        assert not any(code for _, code, *_ in answer.topic_errors), answer
    finally:
        await admin.close()


async def leader_of(bench: Bench, topic: str) -> int:
    """The node that leads partition 0."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bench.address)
    await admin.start()
    try:
        while True:
            (described,) = await admin.describe_topics([topic])
            for partition in described["partitions"]:
                if partition["partition"] == 0 and partition["leader"] >= 0:
                    leader: int = partition["leader"]
                    return leader
    finally:
        await admin.close()


async def test_a_leader_that_is_killed_loses_nothing(
    cluster: list[ApacheKafka], tmp_path: Path
) -> None:
    """E05, E11: the leader of a request partition dies with work in flight and records still to
    come; nothing is lost, what repeats is what was in flight, and the service goes on by itself."""
    bench = Bench(",".join(node.address for node in cluster))
    await make_topics(bench, 3)
    first, second = requests(300), {f"late{i}": {"input": f"late {i}"} for i in range(100)}
    seen: Counter[str] = Counter()
    kept: dict[str, Reply] = {}
    with service_process(bench.config(forward_s=0.05), tmp_path) as service:
        async with bench.reading(bench.replies, 3) as consumer:
            await bench.produce(first)
            while len(seen) < 30:
                await collect_some(consumer, seen, kept)
            victim = cluster[await leader_of(bench, bench.topic) - 1]
            victim.kill()
            while True:
                try:
                    await bench.produce(second)
                    break
                except KafkaError:  # the producer of this test met the dead leader
                    await asyncio.sleep(0.2)
            await collect(consumer, {*first, *second}, seen, kept)
            assert service.process.poll() is None, service.log()
    check_vectors(kept, first | second)
    repeated = sum(count - 1 for count in seen.values())
    print(f"{len(seen)} answered, {repeated} repeated")
    assert repeated <= 256, "more than one hand-out was done again"
