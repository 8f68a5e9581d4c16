"""Settings of transports and their addresses: what is accepted, refused, and how it is said."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from pipeline.transports.broker_names import reply_to_error
from pipeline.transports.files.options import FileOptions
from pipeline.transports.inproc.options import InprocOptions
from pipeline.transports.kafka.options import KafkaOptions
from pipeline.transports.options import SECRET_FIELDS, bounds, declared
from pipeline.transports.redis.options import RedisOptions
from pipeline.transports.redis_list.options import RedisListOptions
from pipeline.transports.registry import KINDS, Kind, parse_url

REQUIRED: dict[Any, dict[str, Any]] = {KafkaOptions: {"bootstrap": "h:1"}}
ALL = [(kind.options, REQUIRED.get(kind.options, {})) for kind in KINDS]


@pytest.mark.parametrize(("cls", "base"), ALL)
def test_defaults_are_consistent(cls: Any, base: dict[str, Any]) -> None:
    assert cls(**base).check() == []


@pytest.mark.parametrize(("cls", "base"), ALL)
def test_every_number_is_checked_by_name(cls: Any, base: dict[str, Any]) -> None:
    """C13: zero, negative, huge and non-numbers are refused with the setting's name."""
    for name, field in declared(cls).items():
        default = base.get(name, field.default)
        is_number = isinstance(default, int | float) and not isinstance(default, bool)
        found = bounds(field.type)
        assert not is_number or found is not None, f"{name} is a number without a range"
        if found is None:
            continue
        low, high = found
        for bad in (low - 1, -5, high + 1, 10**15, float("nan"), True, "7"):
            problems = cls(**{**base, name: bad}).check()
            assert any(problem.startswith(f"{name} is ") for problem in problems), (name, bad)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_has_the_same_files_with_the_same_functions(kind: Kind) -> None:
    assert callable(kind.module("source").open_source) and callable(kind.module("reach").reach)
    assert callable(kind.module("sink").open_sink)
    if kind.asks:
        assert callable(kind.module("ask").open_asker)


def kafka(**settings: Any) -> list[str]:
    return KafkaOptions(bootstrap="h:1", **settings).check()


BEARER = {"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"drain_budget_s": 300.0}, ["drain_budget_s", "max_poll_interval_ms"]),
        ({"heartbeat_interval_ms": 6000}, ["heartbeat_interval_ms", "session_timeout_ms"]),
        ({"fetch_max_wait_ms": 30_000}, ["fetch_max_wait_ms", "request_timeout_ms"]),
        ({"max_in_flight": 5}, ["max_in_flight_per_partition", "max_in_flight"]),
        ({"release_backoff_ms": 20_000}, ["release_backoff_ms", "release_backoff_max_ms"]),
        ({"reply_topic": "embedstream.requests"}, ["reply_topic", "topics"]),
        ({"dead_letter_topic": "embedstream.requests"}, ["dead_letter_topic", "topics"]),
        ({"dead_letter_topic": "embedstream.replies"}, ["dead_letter_topic", "reply_topic"]),
        ({"topics": ()}, ["topics"]),
        ({"topics": ("a b",)}, ["topics"]),
        ({"pattern": "a.*"}, ["topics", "pattern"]),
        ({"topics": (), "pattern": "a("}, ["pattern", "regular expression"]),
        ({"topics": (), "pattern": "(?i)a"}, ["pattern", "regular expression"]),
        ({"topics": (), "pattern": ""}, ["pattern", "empty"]),
        ({"refuse_pattern": "["}, ["refuse_pattern"]),
        ({"group": ""}, ["group"]),
        ({"reply_prefixes": ()}, ["reply_prefixes"]),
        ({"security_protocol": "SASL_SSL"}, ["security_protocol", "sasl_username"]),
        ({"sasl_username": "u"}, ["sasl_username", "security_protocol"]),
        ({"ssl_keyfile": "k"}, ["ssl_keyfile", "ssl_certfile"]),
        ({"group_instance_id": "a\n"}, ["group_instance_id"]),
        (
            {
                "security_protocol": "SASL_SSL",
                "sasl_username": "u",
                "sasl_password": "p",
                "sasl_password_file": "f",
            },
            ["sasl_password", "sasl_password_file"],
        ),
        ({"security_protocol": "SASL_SSL", "sasl_mechanism": "OAUTHBEARER"}, ["sasl_token_file"]),
        ({"sasl_token_file": "t"}, ["token", "OAUTHBEARER"]),
        (
            BEARER | {"sasl_username": "u", "sasl_token_file": "t"},
            ["sasl_username", "OAUTHBEARER"],
        ),
        (
            BEARER | {"sasl_oauthbearer_token_endpoint_url": "https://h/t"},
            ["sasl_oauthbearer_client_id", "sasl_oauthbearer_client_secret_file"],
        ),
        (
            {"sasl_mechanism": "OAUTHBEARER", "sasl_token_file": "t"},
            ["OAUTHBEARER", "security_protocol"],
        ),
    ],
)
def test_kafka_contradictions_name_both_settings(
    settings: dict[str, Any], named: list[str]
) -> None:
    """J04, C13: the drain budget must fit into the poll interval; both settings are named."""
    (problem,) = kafka(**settings)
    assert all(name in problem for name in named), problem


def test_a_pattern_matches_whole_names_and_never_answers() -> None:
    options = parse_url(r"kafka://h:1/?pattern=embedstream\..+&reply_topic=embedstream.out&group=g")
    assert isinstance(options, KafkaOptions) and options.topics == () and options.check() == []
    assert options.reads("embedstream.a") and not options.reads("my.embedstream.a")
    assert not KafkaOptions(bootstrap="h:1", topics=(), pattern="a").reads("ab")
    for name in ("embedstream.out", "embedstream.replies", "embedstream.dead-letters"):
        assert not options.reads(name)
    (place,) = options.consumes()
    assert not any(place.same(written) for written in options.writes())
    assert place.same(options.place_at("embedstream.b"))
    assert place.same(place._replace(name="other", pattern="other"))
    assert not place.same(options.place_at("b"))
    for address in ("kafka://h:1/a?pattern=b", "kafka://h:1/?topics=a&pattern=b"):
        with pytest.raises(ValueError, match="topics"):
            parse_url(address)


@pytest.mark.parametrize(
    "bootstrap", ["", "host", "host:", ":9092", "a:1,,b:2", "user@h:1", "h:1/x"]
)
def test_bad_bootstrap_is_named(bootstrap: str) -> None:
    assert any("bootstrap" in p for p in KafkaOptions(bootstrap=bootstrap).check())


@pytest.mark.parametrize("ttl", [0, -1, 0.4, None, 10**12, True])
def test_reply_ttl_is_validated(ttl: Any) -> None:
    """F12: 0, None, 0.4 and 10^12 are refused at the start, for replies and dead letters."""
    for name in ("reply_ttl_s", "dead_letter_ttl_s"):
        assert any(name in problem for problem in RedisOptions(**{name: ttl}).check())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"block_ms": 10_000}, ["block_ms", "socket_timeout_s"]),
        ({"claim_interval_ms": 70_000}, ["claim_interval_ms", "claim_idle_ms"]),
        ({"stream": "embedstream.dead-letters"}, ["stream", "dead_letter_stream"]),
        ({"start": "yesterday"}, ["start"]),
        ({"consumer": ""}, ["consumer"]),
        ({"group": "a\nb"}, ["group"]),
        ({"stream": "x" * 250}, ["stream"]),
    ],
)
def test_redis_contradictions_name_both_settings(
    settings: dict[str, Any], named: list[str]
) -> None:
    """F01: a blocking read must end before the socket time-out."""
    (problem,) = RedisOptions(**settings).check()
    assert all(name in problem for name in named), problem


def test_file_contradictions() -> None:
    assert "replies" in FileOptions(path="/a", replies="/a").check()[0]
    assert "dead_letters" in FileOptions(replies="/a", dead_letters="/a").check()[0]


def test_addresses() -> None:
    assert parse_url("kafka://a:1,b:2/t1,t2?group=g&partitions=3&idempotent=false") == KafkaOptions(
        bootstrap="a:1,b:2", topics=("t1", "t2"), group="g", partitions=3, idempotent=False
    )
    assert parse_url("kafka://a/t?idempotent=auto").idempotent == "auto"  # type: ignore[union-attr]
    assert parse_url("kafka://a") == KafkaOptions(bootstrap="a:9092")
    assert parse_url("kafka://[::1]:9/t") == KafkaOptions(bootstrap="[::1]:9", topics=("t",))
    assert parse_url("redis://u:p%40s@h:7/str?db=2&claim_idle_ms=9000") == RedisOptions(
        host="h", port=7, username="u", password="p@s", stream="str", db=2, claim_idle_ms=9000
    )
    assert parse_url("rediss://h/s") == RedisOptions(host="h", stream="s", tls=True)
    assert parse_url("redis://h") == RedisOptions(host="h")
    assert parse_url("redis://h/") == RedisOptions(host="h")
    assert parse_url("inproc://n?max_queued=3") == InprocOptions(name="n", max_queued=3)
    assert parse_url("file:///tmp/a%20b.jsonl?replies=/x") == FileOptions(
        path="/tmp/a b.jsonl", replies="/x"
    )
    assert parse_url("-") == FileOptions()


def test_a_number_as_the_path_of_a_redis_address_is_the_database() -> None:
    """K05: as everywhere else; the stream stands beside it as a parameter."""
    assert parse_url("redis://h/3") == RedisOptions(host="h", db=3)
    assert parse_url("redis://h/3/") == RedisOptions(host="h", db=3)
    both = RedisOptions(host="h", db=3, stream="jobs")
    assert parse_url("redis://h/3?stream=jobs") == parse_url("redis://h/jobs?db=3") == both
    assert parse_url("redis://h/jobs/3") == RedisOptions(host="h", stream="jobs/3")
    assert parse_url("redis://h?stream=3") == RedisOptions(host="h", stream="3")


def test_several_servers_in_a_redis_address() -> None:
    """Sentinels and nodes of a cluster; each has the port of its kind unless it says another."""
    behind = parse_url("redis://u:p@a,b:7,[::1]:8/jobs?sentinel=main&sentinel_password=s")
    assert isinstance(behind, RedisOptions)
    assert behind.servers() == [("a", 26379), ("b", 7), ("::1", 8)]
    assert (behind.sentinel, behind.stream, behind.username) == ("main", "jobs", "u")
    assert "'s'" not in repr(behind)
    nodes = parse_url("rediss-list://a,b/jobs?cluster=true")
    assert isinstance(nodes, RedisListOptions)
    assert nodes.servers() == [("a", 6379), ("b", 6379)] and nodes.tls and nodes.cluster
    assert nodes.address == "rediss-list://a:6379,b:6379"


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("redis://a,b/s", "sentinel=NAME.*cluster=true"),
        ("redis://a,b/3?cluster=true", "database 0 only"),
        ("redis://a,b/s?cluster=true&sentinel=m", "remove one"),
        ("redis://a,b:0x/s?cluster=true", "the port is no number"),
        ("redis://a/s?nodes=b&cluster=true", "host:port"),
        ("redis://a,/s?cluster=true&nodes=x:1", "given twice"),
    ],
)
def test_servers_that_cannot_be_are_refused(url: str, named: str) -> None:
    """K14"""
    with pytest.raises(ValueError, match=named):
        parse_url(url)


@pytest.mark.parametrize(
    ("url", "tag"),
    [
        ("redis-list://h/jobs", "{jobs}:"),
        ("redis-list://h/%7Bteam%7Djobs", "{team}:{team}jobs:"),
    ],
)
def test_the_keys_of_a_list_lie_in_one_slot(url: str, tag: str) -> None:
    """A cluster moves an element in one step only within a slot."""
    options = parse_url(url)
    assert isinstance(options, RedisListOptions) and options.own_prefix == tag
    own = (options.consumers, options.attempts, options.processing("me"), options.key)
    assert len({key_slot(name.encode()) for name in own}) == 1


@pytest.mark.parametrize("url", ["redis://h/3/jobs", "redis://h/20260101"])
def test_a_path_that_may_be_database_or_stream_is_refused_with_both_spellings(url: str) -> None:
    """K05"""
    with pytest.raises(ValueError, match=r"db=NUMBER.*stream=NAME"):
        parse_url(url)


def test_a_plus_in_a_secret_stays() -> None:
    """K13"""
    options = parse_url("kafka://h/t?sasl_password=a+b%20c%2B&sasl_username=u"
                        "&security_protocol=sasl_ssl")  # fmt: skip
    assert isinstance(options, KafkaOptions)
    assert (options.sasl_password, options.security_protocol) == ("a+b c+", "SASL_SSL")
    assert parse_url("redis://u:a+b@h/s") == RedisOptions(
        host="h", username="u", password="a+b", stream="s"
    )


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:S3CRET/S3CRET@host:6379/s",
        "redis://user:S3CRET?S3CRET@host:6379/s",
        "redis://user:S3CRET#S3CRET@host:6379/s",
        "redis://:12/S3CRET@host:6379/s",
        "redis://user:12?S3CRET=S3CRET@host:6379/s",
        "redis://user/S3CRET@host",
        "kafka://user:S3CRET/S3CRET@host:9092/t",
        "kafka://user:S3CRET?S3CRET=1@host:9092/t",
        "kafka://user/S3CRET@host:9092/t",
    ],
)
def test_an_unescaped_character_in_a_password_is_named_and_the_password_is_not(url: str) -> None:
    """K13"""
    with pytest.raises(
        ValueError, match=r"'/' in that as %2F, '\?' as %3F and '#' as %23"
    ) as caught:
        parse_url(url)
    assert "S3CRET" not in str(caught.value) and "12" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis:/user:S3CRET@host:1/x",
        "redis:user:S3CRET@host",
        "user:S3CRET@host:1",
        "S3CRET",
        "redis://u:S3CRET[@host",
        "redis://u:S3CRET\u2100@host/s",
        "redis://u:%FFS3CRET@host/s",
        "kafka://h/t?S3CRET",
    ],
)
def test_what_cannot_be_read_is_refused_without_repeating_it(url: str) -> None:
    """K32"""
    with pytest.raises(ValueError) as caught:
        parse_url(url)
    assert "S3CRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("redis://h/3?db=4", ["'db'", "twice"]),
        ("kafka://h:1/t?grup=g", ["unknown parameter 'grup'"]),
        ("kafka://h:1/t?group=a&group=b", ["'group'", "twice"]),
        ("kafka://h:1/t?topics=b", ["'topics'", "twice"]),
        ("kafka://h:1/t?partitions=many", ["partitions", "number"]),
        ("kafka://h:1/t?auto_create=maybe", ["auto_create", "true or false"]),
        ("kafka://h:1/t?compression=best", ["compression"]),
        ("kafka://h:1/t?drain_budget_s=999", ["drain_budget_s", "max_poll_interval_ms"]),
        ("kafka://u:pw@h:1/t", ["sasl_username"]),
        ("kafka:///t", ["host:port"]),
        ("redis://h:99999/s", ["port"]),
        ("redis://h/s?block_ms=99999999", ["block_ms"]),
        ("redis://h/s#frag", ["%23"]),
        ("http://h/s", ["unknown transport 'http'", "kafka://"]),
        ("nonsense", ["unknown transport"]),
        ("file://host/path", ["local path"]),
        ("file://", ["no path"]),
        ("redis://u:topsecret@h/s?bad=1", ["'bad'"]),
    ],
)
def test_bad_addresses_are_refused_by_name(url: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        parse_url(url)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "topsecret" not in message
    assert "\n" not in message


@given(st.text(max_size=60), st.sampled_from(["", "kafka://", "redis://", "inproc://", "file://"]))
def test_any_text_is_options_or_a_value_error(text: str, scheme: str) -> None:
    try:
        options = parse_url(scheme + text)
    except ValueError as error:
        assert str(error)
    else:
        assert options.check() == []


def test_secrets_are_known() -> None:
    assert {"password", "sasl_password", "ssl_password"} <= SECRET_FIELDS
    redis = RedisOptions(host="h", password="s3cret")
    kafka = KafkaOptions(bootstrap="h:1", sasl_password="s3cret", ssl_password="s3cret")
    assert "s3cret" not in redis.address
    for options in (redis, kafka):
        assert "s3cret" not in f"{options!r} {options}"
        assert "password='***'" in repr(options) or "password=***" in repr(options)


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("embedstream.replies.mine", True),
        ("embedstream.requests", False),
        ("embedstream.other-source", False),
        ("embedstream.dead-letters", False),
        ("other", False),
        ("EMBEDSTREAM.x", False),
        ("embedstream.\x00", False),
        ("embedstream.\ud800", False),
        ("embedstream." + "x" * 238, False),
        ("", False),
    ],
)
def test_reply_destinations(name: str, allowed: bool) -> None:
    """D: a request names only what the allow-list covers, never a source or the dead letters."""
    reason = reply_to_error(
        name,
        prefixes=("embedstream.",),
        sources=("embedstream.requests", "embedstream.other-source"),
        dead_letters="embedstream.dead-letters",
    )
    assert (reason is None) == allowed
