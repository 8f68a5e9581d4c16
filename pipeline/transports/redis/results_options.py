"""The address of the Redis where results are kept.

Who calls it: the settings, to check it; `pipeline.app`, which opens `RedisResults` with it.
What must stay true: no client is imported here; what the address says and nothing reads is refused by name.
"""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

import msgspec

from pipeline.transports.redis.options import RedisOptions

CONNECT_S, WRITE_S = 1.0, 1.0
PARAMETERS = frozenset({
    "db", "sentinel", "sentinel_username", "sentinel_password",
    "ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_check_hostname",
})  # fmt: skip


def results_options(url: str) -> RedisOptions:
    """Where results are kept: ``redis://[user:password@]host[:port][/db]``, ``rediss://`` for TLS.

    Raises `ValueError` with one line.
    """
    from pipeline.transports.address import read_address

    scheme = urlsplit(url).scheme.lower()
    if scheme not in ("redis", "rediss"):
        raise ValueError("results are kept in Redis: redis://host:6379/0, or rediss:// for TLS")
    for name, _ in parse_qsl(urlsplit(url).query, keep_blank_values=True):
        if name not in PARAMETERS:
            raise ValueError(f"unknown parameter {name!r}; known: {', '.join(sorted(PARAMETERS))}")
    options = read_address(url, RedisOptions)
    if options.stream != RedisOptions().stream:
        raise ValueError("the path of the address is a database number, such as /0")
    return msgspec.structs.replace(options, socket_timeout_s=WRITE_S, connect_timeout_s=CONNECT_S)
