"""Records in the wire format of a schema registry (Avro, JSON Schema, Protobuf), read as JSON.

Who calls it: the graph, around the decoder of a route whose address names a registry; `cluster.survey`.
What must stay true: a record without the format's magic byte is left as it is; a record that its schema
does not fit is unreadable, a registry that does not answer is waited for; dead letters keep the
original bytes, because only decoders see what comes out here.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from actors.backoff import Backoff
from actors.ports import Delivery
from actors.route import Decoded, Decoder
from pipeline.transports.kafka.deliveries import key_of_id
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.kafka.security import secret_of
from schemas.errors import UndecodableRecord
from schemas.headers import CONTENT_TYPE

log = structlog.get_logger(__name__)

_MAGIC = 0
_PREFIX_BYTES = 5
"""The magic byte and the schema's id, a big-endian int32."""
_TIMEOUT_S = 5.0
_RETRY_FIRST_S, _RETRY_LONGEST_S = 0.5, 10.0
_NOT_FOUND = 404
_NEEDS = "schema_registry_url needs the extra schema-registry: pip install 'embedstream[schema-registry]'"


class RegistryUnreachable(Exception):
    """The registry did not answer, or answered with an error of its own."""


class _Unreadable(Exception):
    """The record does not fit its schema, or there is no such schema."""


class Registry:
    """Schemas by id, fetched once each. For one thread."""

    def __init__(self, options: KafkaOptions) -> None:
        """Raises `ConnectionError` when the extra is missing or a secret cannot be read."""
        try:
            from confluent_kafka.schema_registry import SchemaRegistryClient
        except ImportError:
            raise ConnectionError(_NEEDS) from None
        self.url = options.schema_registry_url
        settings: dict[str, Any] = {"url": self.url, "timeout": _TIMEOUT_S, "max.retries": 0}
        if options.schema_registry_cafile is not None:
            settings["ssl.ca.location"] = options.schema_registry_cafile
        if options.schema_registry_username is not None:
            password = secret_of(options, "schema_registry_password") or ""
            settings["basic.auth.user.info"] = f"{options.schema_registry_username}:{password}"
        self._client = SchemaRegistryClient.new_client(settings)
        self._readers: dict[int, Callable[[bytes], Any]] = {}

    def probe(self) -> None:
        """Raises `RegistryUnreachable`."""
        self._asked(self._client.get_config)

    def close(self) -> None:
        """Disconnect."""
        self._client.close()

    def read(self, record: bytes) -> Any:
        """What a record says, as JSON has it: bytes in base64, times in ISO 8601, decimals as text."""
        schema_id = int.from_bytes(record[1:_PREFIX_BYTES], "big")
        reader = self._readers.get(schema_id)
        if reader is None:
            schema = self._asked(partial(self._client.get_schema, schema_id))
            reader = self._readers[schema_id] = self._reader(schema)
        try:
            return msgspec.to_builtins(reader(record))
        except RegistryUnreachable:
            raise
        except Exception as error:  # noqa: BLE001  whatever the library makes of foreign bytes
            raise _Unreadable(
                f"the record does not fit its schema {schema_id} ({type(error).__name__})"
            ) from None

    def _asked(self, question: Callable[[], Any]) -> Any:
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        try:
            return question()
        except SchemaRegistryError as error:
            if error.http_status_code == _NOT_FOUND:
                raise _Unreadable("the registry knows no schema of that id") from None
            raise RegistryUnreachable(f"status {error.http_status_code}") from None
        except Exception as error:  # noqa: BLE001  its HTTP library's errors are not its interface
            raise RegistryUnreachable(type(error).__name__) from None

    def _reader(self, schema: Any) -> Callable[[bytes], Any]:
        if schema.schema_type == "PROTOBUF":
            return _ProtobufReader(schema, self._dependencies(schema)).read
        if schema.schema_type == "JSON":
            from confluent_kafka.schema_registry.json_schema import JSONDeserializer as Reader
        elif schema.schema_type == "AVRO":
            from confluent_kafka.schema_registry.avro import AvroDeserializer as Reader
        else:
            raise _Unreadable(f"schemas of type {schema.schema_type} are not read")
        # The id names the schema; which subject it is registered under does not matter here.
        conf = {"subject.name.strategy": lambda *_: None}
        deserialize = Reader(schema_str=None, schema_registry_client=self._client, conf=conf)
        return lambda record: deserialize(record, None)

    def _dependencies(self, schema: Any) -> dict[str, str]:
        """Import path -> text, of everything that a Protobuf schema imports from the registry."""
        found: dict[str, str] = {}
        for one in schema.references or ():
            version = self._asked(partial(self._client.get_version, one.subject, one.version))
            found |= {one.name: version.schema.schema_str, **self._dependencies(version.schema)}
        return found


class _ProtobufReader:
    """Messages of one schema. The registry holds its text, which protoc compiles."""

    def __init__(self, schema: Any, dependencies: Mapping[str, str]) -> None:
        from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
        from grpc_tools import protoc

        with tempfile.TemporaryDirectory() as folder:
            root, out = Path(folder, "in"), Path(folder, "out")
            for name, text in {**dependencies, _MAIN: schema.schema_str}.items():
                path = (root / name).resolve()
                if not path.is_relative_to(root.resolve()):
                    raise _Unreadable("a schema imports from outside the registry")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, "utf-8")
            included = Path(protoc.__file__).parent / "_proto"
            status = protoc.main(
                [
                    "protoc", f"-I{root}", f"-I{included}", "--include_imports",
                    f"--descriptor_set_out={out}", _MAIN,
                ]
            )  # fmt: skip
            if status != 0:
                raise _Unreadable("the schema cannot be compiled")
            files = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
        pool = descriptor_pool.DescriptorPool()
        for file in files.file:
            pool.Add(file)
        self._top = list(pool.FindFileByName(_MAIN).message_types_by_name.values())
        self._class_of = message_factory.GetMessageClass

    def read(self, record: bytes) -> Any:
        from google.protobuf.json_format import MessageToDict

        place, at = _zigzags(record, _PREFIX_BYTES)
        message = self._top[place[0]]
        for index in place[1:]:
            message = message.nested_types[index]
        parsed = self._class_of(message).FromString(record[at:])
        return MessageToDict(parsed, preserving_proto_field_name=True)


_MAIN = "record.proto"


def _zigzags(record: bytes, at: int) -> tuple[list[int], int]:
    """Which message of the schema it is: a count and as many indexes; and where the message begins."""

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = record[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return (value >> 1) ^ -(value & 1)

    count = number()
    return ([number() for _ in range(count)] if count else [0]), at


class _Read:
    """A delivery with the body and key that its decoder reads in place of the original ones."""

    def __init__(self, delivery: Delivery, body: bytes | None, key: str | None) -> None:
        self._delivery = delivery
        self.body = body
        self.key = key
        self.headers = {**delivery.headers, CONTENT_TYPE: b"application/json"}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._delivery, name)


class RegistryDecoder(Decoder):
    """`inner`, reading what the registry's schemas say of the records."""

    def __init__(self, inner: Decoder, registry: Registry) -> None:
        self._inner = inner
        self._registry = registry
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="schema-registry")
        self._read: dict[int, Delivery | _Unreadable] = {}  # by id() of the running hand-out

    async def look_ahead(self, deliveries: Sequence[Delivery]) -> None:
        """See `Decoder`."""
        self._read = {id(one): await self._as_json(one) for one in deliveries}
        await self._inner.look_ahead(
            [one for one in self._read.values() if not isinstance(one, _Unreadable)]
        )

    async def decode(self, delivery: Delivery) -> Decoded | None:
        """See `Decoder`."""
        read = self._read.pop(id(delivery), None) or await self._as_json(delivery)
        if isinstance(read, _Unreadable):
            raise UndecodableRecord(str(read))
        return await self._inner.decode(read)

    async def _as_json(self, delivery: Delivery) -> Delivery | _Unreadable:
        key = None if delivery.key is None else key_of_id(delivery.key)
        if not (_is_framed(delivery.body) or _is_framed(key)):
            return delivery
        backoff = Backoff(_RETRY_FIRST_S, _RETRY_LONGEST_S)
        while True:
            try:
                return await asyncio.get_running_loop().run_in_executor(
                    self._thread, self._converted, delivery, key
                )
            except _Unreadable as error:
                return error
            except RegistryUnreachable as error:
                log.warning("schema_registry_unreachable", url=self._registry.url, error=str(error))
                await asyncio.sleep(backoff.next_s())

    def _converted(self, delivery: Delivery, key: bytes | None) -> Delivery:
        body, name = delivery.body, delivery.key
        if body is not None and _is_framed(body):
            body = msgspec.json.encode(self._registry.read(body))
        if key is not None and _is_framed(key):
            read = self._registry.read(key)
            name = read if isinstance(read, str) else json.dumps(read, separators=(",", ":"))
        return _Read(delivery, body, name)

    def close(self) -> None:
        """See `Decoder`."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._registry.close()
        self._inner.close()


def _is_framed(value: bytes | None) -> bool:
    return value is not None and len(value) > _PREFIX_BYTES and value[0] == _MAGIC


async def reach_registry(options: KafkaOptions) -> None:
    """Raises `ConnectionError` when the registry that `options` name cannot be used."""
    if options.schema_registry_url is None:
        return
    registry = Registry(options)
    try:
        await asyncio.to_thread(registry.probe)
    except (RegistryUnreachable, _Unreadable) as error:
        raise ConnectionError(
            f"the schema registry {options.schema_registry_url} cannot be used ({error}): check "
            "schema_registry_url, schema_registry_username and its password"
        ) from None
    finally:
        registry.close()
