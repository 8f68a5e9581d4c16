"""Kafka only: logins, certificates and rights, on an Apache Kafka that asks for them."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.kafka.reach import reach
from pipeline.transports.registry import open_asker
from tests.conformance.kafka_harness import KafkaHarness
from tests.conformance.transport_suite import collect, flushed, running
from tests.support.secured_kafka import (
    PASSWORD,
    SCRAM_USER,
    STRANGER,
    WORKER,
    SecuredKafka,
    token_endpoint,
    unsigned_token,
)
from tests.support.servers import ServerInfo

pytestmark = [pytest.mark.kafka, pytest.mark.real_kafka]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    server = SecuredKafka(tmp_path_factory.mktemp("secured"))
    yield server
    server.close()


@pytest.fixture
async def harness(secured: SecuredKafka) -> AsyncIterator[KafkaHarness]:
    """Its own clients use the listener that asks nobody."""
    harness = KafkaHarness(ServerInfo(secured.plain, "apache", secured.server), partitions=1)
    yield harness
    await harness.aclose()


def documented_rights(harness: KafkaHarness) -> list[tuple[str, str, list[str]]]:
    """The rows of the table of rights in docs/kafka.md, for the topics and the group of a test."""
    page = (ROOT / "docs" / "kafka.md").read_text("utf-8")
    names = {
        "request topic": ("topic", harness.topic),
        "group": ("group", harness.group),
        "reply topic": ("topic", harness.reply_topic),
        "dead-letter topic": ("topic", harness.dead_letters),
    }
    rows = re.findall(
        r"^\| (request topic|group|reply topic|dead-letter topic) \| ([^|]+)\|", page, re.M
    )
    assert {what for what, _ in rows} == set(names)
    return [(*names[what], re.findall(r"`([A-Z_]+)`", operations)) for what, operations in rows]


async def a_request_goes_through(harness: KafkaHarness, login: dict[str, Any]) -> None:
    await harness.produce(b"secured")
    async with running(harness.options(**login, auto_create=False)) as transport:
        (delivery,) = await collect(transport.source, 1, settle=False)
        assert delivery.body == b"secured"
        await transport.sink.publish(harness.reply_topic, "r", b"answer", {})
        delivery.settle()
        await flushed(transport.source)
    assert await harness.committed() == {0: 1}
    assert await harness.replies(harness.reply_topic, bool) == [b"answer"]


async def prepared(harness: KafkaHarness, secured: SecuredKafka, user: str) -> None:
    """Topics, and the rights that the page asks for."""
    for topic in (harness.topic, harness.reply_topic, harness.dead_letters):
        await harness.create_topic(topic, 1)
    for kind, name, operations in documented_rights(harness):
        secured.allow(user, kind, name, operations)


@pytest.mark.parametrize(
    "login", ["plain", "password_file", "mutual_tls", "token_file", "endpoint"]
)
async def test_the_documented_rights_are_enough(
    harness: KafkaHarness, secured: SecuredKafka, login: str, tmp_path: Path
) -> None:
    """K13: a client with no more than the rights of docs/kafka.md, whichever way it logs in."""
    await prepared(harness, secured, WORKER)
    secret = tmp_path / "secret"
    if login == "plain":
        await a_request_goes_through(harness, secured.sasl_options())
    elif login == "password_file":
        secret.write_text(PASSWORD + "\n")
        options = secured.sasl_options(sasl_password=None, sasl_password_file=str(secret))
        await a_request_goes_through(harness, options)
    elif login == "mutual_tls":
        await a_request_goes_through(harness, secured.tls_options())
    elif login == "token_file":
        secret.write_text(unsigned_token(WORKER, time.time()) + "\n")
        await a_request_goes_through(harness, secured.token_options(sasl_token_file=str(secret)))
    else:
        token = unsigned_token(WORKER, time.time())
        with token_endpoint("an+id:a%2Fsecret", token) as (url, asked):
            options = secured.token_options(
                sasl_oauthbearer_token_endpoint_url=url,
                sasl_oauthbearer_client_id="an id",
                sasl_oauthbearer_client_secret="a/secret",
                sasl_oauthbearer_scope="kafka",
            )
            await a_request_goes_through(harness, options)
        assert set(asked) == {"grant_type=client_credentials&scope=kafka"}


@pytest.mark.parametrize("bits", [256, 512])
async def test_scram(harness: KafkaHarness, secured: SecuredKafka, bits: int) -> None:
    for topic in (harness.topic, harness.reply_topic, harness.dead_letters):
        await harness.create_topic(topic, 1)
    login = secured.sasl_options(SCRAM_USER, sasl_mechanism=f"SCRAM-SHA-{bits}")
    await a_request_goes_through(harness, login)


async def test_a_service_is_asked_with_the_same_address(
    harness: KafkaHarness, secured: SecuredKafka, tmp_path: Path
) -> None:
    """`--via` logs in as the source does, from the same file."""
    await prepared(harness, secured, WORKER)
    secured.allow(WORKER, "topic", harness.topic, ["WRITE"])
    secured.allow(WORKER, "topic", harness.reply_topic, ["READ"])
    secret = tmp_path / "secret"
    secret.write_text(PASSWORD)
    query = urlencode(
        secured.sasl_options(sasl_password_file=str(secret), reply_topic=harness.reply_topic)
        | {"bootstrap": "", "sasl_password": ""}
    )
    query = "&".join(pair for pair in query.split("&") if not pair.endswith("="))
    asker = await open_asker(f"kafka://{secured.sasl}/{harness.topic}?{query}", timeout_s=10)
    try:
        with pytest.raises(TimeoutError):
            await asker.ask("one", b'{"id":"one","input":"x"}', "application/json", timeout_s=1)
        records = await harness._read(harness.topic, bool)
        assert records[0].value == b'{"id":"one","input":"x"}'
    finally:
        await asker.aclose()


WRONG = {
    "password": ({"sasl_password": "wrong"}, ("sasl", {}), ["Authentication", "sasl_password"]),
    "user": ({"sasl_username": "nobody"}, ("sasl", {}), ["Authentication", "sasl_username"]),
    "authority": (
        {"ssl_cafile": "OTHER"},
        ("sasl", {}),
        ["CERTIFICATE_VERIFY_FAILED", "ssl_cafile"],
    ),
    "no certificate": ({"ssl_certfile": None, "ssl_keyfile": None}, ("tls", {}), ["ssl_certfile"]),
    "no TLS": ({"security_protocol": "SASL_PLAINTEXT"}, ("sasl", {}), ["security_protocol"]),
    "mechanism": (
        {"sasl_mechanism": "SCRAM-SHA-512"},
        ("sasl", {}),
        ["Authentication", "sasl_mechanism"],
    ),
}


@pytest.mark.parametrize("fault", WRONG)
async def test_what_is_wrong_is_one_line(
    harness: KafkaHarness, secured: SecuredKafka, fault: str
) -> None:
    """K49: a login that is not taken is one line with the setting to look at, and no secret in it."""
    change, (listener, _), named = WRONG[fault]
    change = {k: str(secured.other_ca) if v == "OTHER" else v for k, v in change.items()}
    login = {"sasl": secured.sasl_options, "tls": secured.tls_options}[listener](**change)
    with pytest.raises(ConnectionError) as caught:
        await reach(harness.options(**login))
    said = str(caught.value)
    assert "\n" not in said and all(word in said for word in named), said
    assert PASSWORD not in said and "wrong" not in said


async def test_a_token_that_cannot_be_had_is_one_line(
    harness: KafkaHarness, secured: SecuredKafka, tmp_path: Path
) -> None:
    with pytest.raises(ConnectionError, match=r"sasl_token_file .*FileNotFoundError"):
        await reach(harness.options(**secured.token_options(sasl_token_file=str(tmp_path / "no"))))
    with token_endpoint("id:right", "unused") as (url, _):
        login = secured.token_options(
            sasl_oauthbearer_token_endpoint_url=url,
            sasl_oauthbearer_client_id="id",
            sasl_oauthbearer_client_secret="hunter2",
        )
        with pytest.raises(ConnectionError, match=r"gave no token \(status 401\)") as caught:
            await reach(harness.options(**login))
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("missing", ["topic", "group"])
async def test_a_right_that_is_missing_is_named(
    harness: KafkaHarness, secured: SecuredKafka, missing: str
) -> None:
    """K49: `check` and the start both see it, before a model is loaded."""
    for topic in (harness.topic, harness.reply_topic, harness.dead_letters):
        await harness.create_topic(topic, 1)
    for kind, name, operations in documented_rights(harness):
        if not (kind == missing and name in (harness.topic, harness.group)):
            secured.allow(STRANGER, kind, name, operations)
    secured.allow(
        STRANGER, "topic", harness.topic, ["DESCRIBE"]
    )  # unseen, it is as good as missing
    options: KafkaOptions = harness.options(**secured.sasl_options(STRANGER), auto_create=False)
    name = harness.topic if missing == "topic" else harness.group
    with pytest.raises(ConnectionError, match=f"READ on .*{re.escape(name)}"):
        await reach(options)
    with pytest.raises(ConnectionError, match=f"READ on .*{re.escape(name)}"):
        async with running(options):
            pass
