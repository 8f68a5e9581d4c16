"""Addresses of the client."""

from __future__ import annotations

import pytest

from embedstream_client import KafkaEndpoint, RedisEndpoint, parse_url


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("redis://h", RedisEndpoint(host="h")),
        ("redis://", RedisEndpoint()),
        # K05: the path is the database, as everywhere else
        ("redis://h:7000/3", RedisEndpoint(host="h", port=7000, db=3)),
        ("redis://h/3?stream=s", RedisEndpoint(host="h", db=3, stream="s")),
        ("redis://h/my.stream?db=2", RedisEndpoint(host="h", db=2, stream="my.stream")),
        ("redis://h?stream=3", RedisEndpoint(host="h", stream="3")),
        (
            "rediss://u:p%40%2F%2B+x@h",
            RedisEndpoint(host="h", tls=True, username="u", password="p@/++x"),
        ),
        ("redis://:p@[::1]:1/0", RedisEndpoint(host="::1", port=1, password="p")),
        (
            "rediss://h?ssl_ca_certs=/ca.pem&ssl_check_hostname=false",
            RedisEndpoint(host="h", tls=True, ssl_ca_certs="/ca.pem", ssl_check_hostname=False),
        ),
        ("redis-list://h", RedisEndpoint(host="h", key="embedstream.requests")),
        ("redis-list://h/3?key=k", RedisEndpoint(host="h", db=3, key="k")),
        (
            "rediss-list://h/jobs?take_from=left",
            RedisEndpoint(host="h", tls=True, key="jobs", take_from="left"),
        ),
        ("kafka://h", KafkaEndpoint(bootstrap="h:9092")),
        (
            "kafka://a:1,b/t?reply_topic=r",
            KafkaEndpoint(bootstrap="a:1,b:9092", topic="t", reply_topic="r"),
        ),
        (
            "kafka://h?sasl_password=a+b%26&security_protocol=SASL_SSL&max_request_size=5",
            KafkaEndpoint(
                bootstrap="h:9092",
                sasl_password="a+b&",
                security_protocol="SASL_SSL",
                max_request_size=5,
            ),
        ),
    ],
)
def test_addresses(url: str, endpoint: object) -> None:
    assert parse_url(url) == endpoint


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://h", "unknown scheme"),
        ("redis:/u:secret@h/1", "two slashes"),  # K32
        ("redis://h:70000", "port"),
        ("redis://u:se/cret@h", "%2F"),  # K13
        ("redis://h?key=x", "unknown parameter 'key'"),
        ("redis-list://h?stream=x", "unknown parameter 'stream'"),
        ("redis-list://h?take_from=top", "take_from"),
        ("redis://h?streem=x", "unknown parameter 'streem'"),
        ("redis://h/3?db=4", "db is given twice"),
        ("redis://h?db=x", "db"),
        ("redis://h#x", "%23"),
        ("kafka://u:secret@h", "sasl_username"),
        ("kafka:///t", "host:port"),
        ("kafka://h?security_protocol=secret", "security_protocol"),
    ],
)
def test_what_is_no_address_is_refused_in_one_line_without_secrets(url: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_url(url)
    text = str(caught.value)
    assert words in text and "\n" not in text and "secret" not in text and "cret" not in text


def test_no_repr_holds_a_password() -> None:
    for url in ("redis://u:secret@h", "kafka://h?sasl_password=secret"):
        endpoint = parse_url(url)
        assert "secret" not in repr(endpoint) and "secret" not in str(endpoint)
        assert "secret" not in endpoint.address
