"""Records in a schema registry's wire format, written by the vendor's serializers, on a real registry."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import json
import re
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroSerializer
from confluent_kafka.schema_registry.json_schema import JSONSerializer
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc

from actors.decoder import WireDecoder
from actors.ports import SystemClock
from pipeline.app import App
from pipeline.indexing.mapping import DocumentMapping, Raw
from pipeline.indexing.options import DocumentOptions
from pipeline.indexing.records import Version
from pipeline.lifecycle import StopSignal, beside
from pipeline.settings.load import RouteSettings, Settings
from pipeline.transports.kafka.deliveries import id_of_key
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.kafka.schema_registry import (
    Registry,
    RegistryDecoder,
    RegistryUnreachable,
    _ProtobufReader,
    reach_registry,
)
from schemas.codec import decode_reply
from schemas.errors import UndecodableRecord
from schemas.requests import EmbedRequest, Limits, Text
from schemas.results import Reply
from tests.conformance.kafka_harness import KafkaHarness
from tests.support.fakes import FakeDelivery, FakeRunner
from tests.support.schema_registry import ApicurioRegistry, new_registry
from tests.support.servers import ServerInfo, unique

pytestmark = pytest.mark.schema_registry
REQUEST = {"id": "one", "input": ["hello river", "a red mountain"]}
AVRO = json.dumps(
    {
        "type": "record",
        "name": "Request",
        "fields": [
            {"name": "id", "type": "string"},
            {"name": "input", "type": {"type": "array", "items": "string"}},
        ],
    }
)
JSON_SCHEMA = json.dumps(
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Request",
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "input": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["id"],
    }
)
COMMON = 'syntax = "proto3"; package common; message Texts { repeated string input = 1; }'
# What the registry of this suite cannot take is commented out, and put in by the test of imports.
PROTO = """syntax = "proto3";
// import "google/protobuf/timestamp.proto";
// import "common.proto";
message Envelope { message Other { string x = 1; }
  message Request { string id = 1; repeated string input = 2;
    // google.protobuf.Timestamp at = 3; common.Texts more = 4;
  } }
"""


@pytest.fixture(scope="module")
def registry() -> Iterator[ApicurioRegistry]:
    server = new_registry()
    yield server
    server.close()


@pytest.fixture
def client(registry: ApicurioRegistry) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": registry.url}) as client:
        yield client


def options(registry: ApicurioRegistry) -> KafkaOptions:
    return KafkaOptions(bootstrap="h:1", schema_registry_url=registry.url)


def decoder(registry: ApicurioRegistry) -> RegistryDecoder:
    return RegistryDecoder(WireDecoder(Limits()), Registry(options(registry)))


def avro(client: SchemaRegistryClient, value: Any, schema: str = AVRO) -> bytes:
    context = SerializationContext(unique("topic"), MessageField.VALUE)
    body = AvroSerializer(client, schema)(value, context)
    assert isinstance(body, bytes)
    return body


def as_json(client: SchemaRegistryClient, value: Any) -> bytes:
    context = SerializationContext(unique("topic"), MessageField.VALUE)
    body = JSONSerializer(JSON_SCHEMA, client)(value, context)
    assert isinstance(body, bytes)
    return body


def protobuf(
    client: SchemaRegistryClient, value: dict[str, Any], imports: dict[str, str] | None = None
) -> bytes:
    """As the vendor's serializer writes it: a nested message, so its place in the schema is [0, 1]."""
    imports = imports or {}
    references = []
    for name, text in imports.items():
        subject = unique("common")
        client.register_schema(subject, Schema(text, "PROTOBUF"))
        references.append(SchemaReference(name, subject, 1))
    main = PROTO.replace("//", "") if imports else re.sub("//.*", "", PROTO)
    schema_id = client.register_schema(
        unique("request"), Schema(main, "PROTOBUF", references=references)
    )
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {**imports, "main.proto": main}.items():
            Path(folder, name).write_text(text)
        out = Path(folder, "out")
        included = Path(protoc.__file__).parent / "_proto"
        arguments = [f"-I{folder}", f"-I{included}", "--include_imports"]
        assert protoc.main(["", *arguments, f"--descriptor_set_out={out}", "main.proto"]) == 0
        files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in files.file:
        pool.Add(file)
    message = message_factory.GetMessageClass(pool.FindMessageTypeByName("Envelope.Request"))(
        **value
    )
    path = bytes([4, 0, 2])  # zigzag: two indexes, 0 and 1
    return b"\0" + struct.pack(">i", schema_id) + path + message.SerializeToString()


def test_protobuf_imports_come_from_the_registry_too() -> None:
    """With the vendor's own stand-in: the registry of this suite cannot register imports."""
    reader = Registry(KafkaOptions(bootstrap="h:1", schema_registry_url="mock://imports"))
    try:
        common = {"common.proto": COMMON}
        value = {**REQUEST, "at": {"seconds": 1}, "more": {"input": ["x"]}}
        assert reader.read(protobuf(reader._client, value, common)) == {
            **REQUEST,
            "at": "1970-01-01T00:00:01Z",
            "more": {"input": ["x"]},
        }
        body = protobuf(reader._client, REQUEST, common)
        schema = reader._client.get_schema(int.from_bytes(body[1:5], "big"))
        with pytest.raises(Exception, match="outside the registry"):
            _ProtobufReader(schema, {"../../escaped.proto": "x"})
    finally:
        reader.close()


@pytest.mark.parametrize("kind", ["avro", "json", "protobuf"])
async def test_a_request_of_each_format(
    registry: ApicurioRegistry, client: SchemaRegistryClient, kind: str
) -> None:
    write = {"avro": avro, "json": as_json, "protobuf": protobuf}[kind]
    reader = decoder(registry)
    delivery = FakeDelivery(body=write(client, REQUEST))
    try:
        for _ in range(2):  # ahead, and without
            decoded = await reader.decode(delivery)
            assert decoded is not None and isinstance(decoded.request, EmbedRequest)
            assert decoded.request.id == "one"
            assert decoded.request.input == (Text("hello river"), Text("a red mountain"))
            await reader.look_ahead([delivery])
    finally:
        reader.close()


async def test_other_records_are_left_as_they_are(registry: ApicurioRegistry) -> None:
    reader = decoder(registry)
    try:
        plain = FakeDelivery(body=msgpack.packb({"id": "two", "input": "x"}))
        decoded = await reader.decode(plain)
        assert decoded is not None and decoded.request is not None and decoded.request.id == "two"
        assert await reader.decode(FakeDelivery(body=None)) is None
    finally:
        reader.close()


async def test_what_does_not_fit_is_unreadable_and_its_neighbour_is_not(
    registry: ApicurioRegistry, client: SchemaRegistryClient
) -> None:
    """Unknown schema, cut record, a message that the schema has not, a value against its schema."""
    good = avro(client, REQUEST)
    proto = protobuf(client, REQUEST)
    wrong = as_json(client, REQUEST)[:5] + b'{"input": "no list"}'
    bodies = [
        b"\0" + struct.pack(">i", 2**31 - 1) + b"x",
        good[:9],
        proto[:5] + bytes([2, 8]) + b"x",
        proto[:5] + b"\xff" * 30,
        wrong,
        b"\0\0\0\0\0",
    ]
    deliveries = [FakeDelivery(body=body) for body in [*bodies, good]]
    reader = decoder(registry)
    try:
        await reader.look_ahead(deliveries)
        for delivery in deliveries[:-1]:
            with pytest.raises(UndecodableRecord):
                await reader.decode(delivery)
        decoded = await reader.decode(deliveries[-1])
        assert decoded is not None and decoded.request is not None and decoded.request.id == "one"
    finally:
        reader.close()


def test_types_that_json_has_not(registry: ApicurioRegistry, client: SchemaRegistryClient) -> None:
    """Logical types become text, bytes base64, 64-bit numbers stay whole."""
    kinds = {
        "at": {"type": "long", "logicalType": "timestamp-millis"},
        "price": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        "raw": "bytes",
        "big": "long",
        "maybe": ["null", "string"],
    }
    fields = [{"name": name, "type": kind} for name, kind in kinds.items()]
    schema = json.dumps({"type": "record", "name": "Row", "fields": fields})
    row = {
        "at": datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        "price": decimal.Decimal("12.50"),
        "raw": b"\0\xff",
        "big": 2**62,
        "maybe": None,
    }
    reader = Registry(options(registry))
    read = reader.read(avro(client, row, schema))
    reader.close()
    assert read == {
        "at": "2026-01-02T03:04:05Z",
        "price": "12.50",
        "raw": "AP8=",
        "big": 2**62,
        "maybe": None,
    }


async def test_a_debezium_event_with_its_key(
    registry: ApicurioRegistry, client: SchemaRegistryClient
) -> None:
    """Key and value in Avro, as Debezium writes them with its registry converter."""
    row = {"type": "record", "name": "Row", "fields": [
        {"name": "id", "type": "int"}, {"name": "body", "type": "string"}]}  # fmt: skip
    event = {"type": "record", "name": "Envelope", "fields": [
        {"name": "before", "type": ["null", row]}, {"name": "after", "type": ["null", "Row"]},
        {"name": "op", "type": "string"}]}  # fmt: skip
    key_schema = {"type": "record", "name": "Key", "fields": [{"name": "id", "type": "int"}]}
    key = avro(client, {"id": 7}, json.dumps(key_schema))
    body = avro(
        client,
        {"before": None, "after": {"id": 7, "body": "hello"}, "op": "c"},
        json.dumps(event),
    )
    reader = decoder(registry)
    try:
        delivery = FakeDelivery(body=body, key=id_of_key(key))
        read = await reader._as_json(delivery)
        assert not isinstance(read, Exception)
        mapping = DocumentMapping(DocumentOptions(format="debezium", id="key.id", text="{body}"))
        change = mapping.change(Raw(read.key, read.body, Version("t/0", 1)))
        assert change is not None and (change.document_id, change.text) == ("7", "hello")
        gone = await reader._as_json(FakeDelivery(body=None, key=id_of_key(key)))
        assert not isinstance(gone, Exception)
        deleted = mapping.change(Raw(gone.key, gone.body, Version("t/0", 2)))
        assert deleted is not None and (deleted.document_id, deleted.text) == ("7", None)
    finally:
        reader.close()


async def test_a_registry_that_is_away_is_waited_for(
    registry: ApicurioRegistry, client: SchemaRegistryClient
) -> None:
    """Its records are neither lost nor given up, and the start says what is wrong."""
    await reach_registry(options(registry))
    nowhere = KafkaOptions(bootstrap="h:1", schema_registry_url="http://127.0.0.1:9")
    with pytest.raises(
        ConnectionError, match=r"schema registry http://127.0.0.1:9 .*schema_registry_url"
    ):
        await reach_registry(nowhere)
    reader = RegistryDecoder(WireDecoder(Limits()), there := Registry(nowhere))
    try:
        framed = avro(client, REQUEST)
        with pytest.raises(RegistryUnreachable):
            there.read(framed)
        waiting = asyncio.create_task(reader.decode(FakeDelivery(body=framed)))
        while not reader._thread._threads:
            await asyncio.sleep(0.01)
        there.close()
        there._client = Registry(options(registry))._client  # it is back
        decoded = await waiting
        assert decoded is not None and decoded.request is not None and decoded.request.id == "one"
    finally:
        reader.close()


@pytest.mark.kafka
async def test_over_kafka(
    registry: ApicurioRegistry, client: SchemaRegistryClient, kafka_server: ServerInfo
) -> None:
    """Three formats and one record that fits none: three replies, one dead letter with its own bytes."""
    harness = KafkaHarness(kafka_server, partitions=1)
    broken = b"\0\0\0\0\x7fgarbage"
    for name, write in {"a": avro, "j": as_json, "p": protobuf}.items():
        await harness.produce(write(client, REQUEST | {"id": name}))
    await harness.produce(broken)
    source = (
        f"kafka://{kafka_server.address}/{harness.topic}?group={harness.group}"
        f"&reply_topic={harness.reply_topic}&dead_letter_topic={harness.dead_letters}"
        f"&schema_registry_url={registry.url}"
    )
    app = App(
        Settings(routes=(RouteSettings(name="r", source=source),)),
        runner_factories={"fake": FakeRunner},
        clock=SystemClock(),
    )
    stop = StopSignal(10.0)
    async with beside(app.run(stop)):
        bodies = await harness.replies(
            harness.reply_topic,
            lambda found: {"a", "j", "p"} <= {decode_reply(b).id for b in found},
        )
        letters = await harness.replies(harness.dead_letters, bool)
        stop.request("the test is over")
    replies = {reply.id: reply for reply in map(decode_reply, bodies)}
    for name in ("a", "j", "p"):
        reply = replies[name]
        assert isinstance(reply, Reply) and len(reply.items) == 2
    assert letters == [broken]
    await harness.aclose()
