"""How a client of the cluster logs in and encrypts: passwords, tokens, certificates.

Who calls it: `cluster`, and the consumer, producer and admin client that it configures.
What must stay true: a secret comes from the options, a file or a token endpoint, is read anew for each
connection, and stands in no log line and no error.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64encode
from pathlib import Path
from typing import Any

from aiokafka.abc import AbstractTokenProvider

from pipeline.transports.kafka.options import KafkaOptions

_TOKEN_TIMEOUT_S = 5.0
_RENEW_AT = 0.8
"""Share of a token's life after which another is fetched (librdkafka's)."""
_MAX_ANSWER_BYTES = 1 << 20


def client_settings(options: KafkaOptions) -> dict[str, Any]:
    """Keyword arguments that aiokafka's consumer, producer and admin client share.

    Raises `ConnectionError` when a secret or certificate cannot be read.
    """
    settings: dict[str, Any] = {
        "bootstrap_servers": options.bootstrap.split(","),
        "client_id": options.client_id,
        "metadata_max_age_ms": options.metadata_max_age_ms,
        "request_timeout_ms": options.request_timeout_ms,
        "security_protocol": options.security_protocol,
    }
    if "SASL" in options.security_protocol:
        settings["sasl_mechanism"] = options.sasl_mechanism
        if options.sasl_mechanism == "OAUTHBEARER":
            settings["sasl_oauth_token_provider"] = _tokens(options)
        else:
            settings["sasl_plain_username"] = options.sasl_username
            settings["sasl_plain_password"] = secret_of(options, "sasl_password")
    if "SSL" in options.security_protocol:
        settings["ssl_context"] = _ssl_context(options)
    return settings


def what_to_check(options: KafkaOptions) -> str:
    """The remedy when a cluster that wants a login or encryption does not take us."""
    checks = ["security_protocol"]
    if "SASL" in options.security_protocol:
        login = "sasl_username and sasl_password"
        if options.sasl_mechanism == "OAUTHBEARER":
            login = "where the token comes from"
        checks += ["sasl_mechanism", login]
    if "SSL" in options.security_protocol:
        checks.append("ssl_cafile, ssl_certfile and ssl_keyfile")
    return f"check {', '.join(checks)}"


def secret_of(options: KafkaOptions, name: str) -> str | None:
    """The option `name`, or what the file of `name`_file holds. Raises `ConnectionError`."""
    path: str | None = getattr(options, f"{name}_file")
    if path is None:
        value: str | None = getattr(options, name)
        return value
    return _read(f"{name}_file", path)


def _read(option: str, path: str) -> str:
    try:
        return Path(path).read_text("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConnectionError(
            f"{option} {path} cannot be read ({type(error).__name__}): check its path and its "
            "permissions"
        ) from None


def _ssl_context(options: KafkaOptions) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.ssl_cafile)
        if options.ssl_certfile is not None:
            context.load_cert_chain(
                options.ssl_certfile, options.ssl_keyfile, password=options.ssl_password
            )
    except (OSError, ssl.SSLError) as error:
        raise ConnectionError(
            f"Kafka TLS files cannot be read ({error}): check ssl_cafile, ssl_certfile and ssl_keyfile"
        ) from None
    context.check_hostname = options.ssl_check_hostname
    return context


def _tokens(options: KafkaOptions) -> AbstractTokenProvider:
    if options.sasl_token_file is not None:
        return _TokenFile(options.sasl_token_file)
    return _TokenEndpoint(options)


class _TokenFile(AbstractTokenProvider):  # type: ignore[misc]
    """A token that something else keeps fresh in a file (a projected service account token)."""

    def __init__(self, path: str) -> None:
        self._path = path
        _read("sasl_token_file", path)  # a wrong path shows now

    async def token(self) -> str:
        return _read("sasl_token_file", self._path).strip()


class _TokenEndpoint(AbstractTokenProvider):  # type: ignore[misc]
    """The client credentials grant of OAuth 2.0 (RFC 6749, section 4.4)."""

    def __init__(self, options: KafkaOptions) -> None:
        self._options = options
        self._token, self._renew_at = "", 0.0
        self._one = asyncio.Lock()

    async def token(self) -> str:
        async with self._one:  # several connections open at once
            if time.monotonic() >= self._renew_at:
                answer = await asyncio.to_thread(self._fetch)
                life_s = float(answer.get("expires_in", 0))
                self._token = str(answer["access_token"])
                self._renew_at = time.monotonic() + life_s * _RENEW_AT
            return self._token

    def _fetch(self) -> dict[str, Any]:
        options = self._options
        url = options.sasl_oauthbearer_token_endpoint_url
        assert url is not None
        form = {"grant_type": "client_credentials"}
        if options.sasl_oauthbearer_scope is not None:
            form["scope"] = options.sasl_oauthbearer_scope
        secret = secret_of(options, "sasl_oauthbearer_client_secret")
        # RFC 6749, section 2.3.1: both are form-encoded before they are joined.
        pair = ":".join(
            urllib.parse.quote_plus(part or "")
            for part in (options.sasl_oauthbearer_client_id, secret)
        )
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked with the options
            url,
            data=urllib.parse.urlencode(form).encode(),
            headers={
                "Authorization": f"Basic {b64encode(pair.encode()).decode()}",
                "Accept": "application/json",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=_TOKEN_TIMEOUT_S) as response:  # noqa: S310
                answer = json.loads(response.read(_MAX_ANSWER_BYTES))
        except urllib.error.HTTPError as error:
            error.close()
            why = f"status {error.code}"
        except (OSError, ValueError) as error:
            why = type(getattr(error, "reason", error)).__name__
        else:
            if isinstance(answer, dict) and isinstance(answer.get("access_token"), str):
                return answer
            why = "no access_token in its answer"
        raise ConnectionError(
            f"the token endpoint {url} gave no token ({why}): check "
            "sasl_oauthbearer_token_endpoint_url, sasl_oauthbearer_client_id and its secret"
        )
