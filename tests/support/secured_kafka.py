"""An Apache Kafka that wants a login: TLS, SASL, mutual TLS and ACLs, and who may do what there.

Who calls it: tests of the Kafka transport's security.
"""

from __future__ import annotations

import json
import threading
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import trustme
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from pipeline.local.server import free_port
from tests.support.servers import new_apache, start_now

PASSWORD = "s3cret/+@ pass"
WORKER, SCRAM_USER, STRANGER = "worker", "scrammer", "stranger"
_LOGIN_MODULE = "org.apache.kafka.common.security"


class SecuredKafka:
    """Listeners: `plain` (anybody, a super user), `sasl` (SASL over TLS) and `tls` (mutual TLS)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        authority = trustme.CA()
        self.ca = folder / "ca.pem"
        authority.cert_pem.write_to_path(self.ca)
        self.other_ca = folder / "other-ca.pem"
        trustme.CA().cert_pem.write_to_path(self.other_ca)
        keystore = folder / "broker.pem"
        _write_keystore(authority.issue_cert("127.0.0.1"), keystore)
        self.cert, self.key = folder / "worker.crt", folder / "worker.key"
        mine = authority.issue_cert("worker.invalid", common_name=WORKER)
        mine.cert_chain_pems[0].write_to_path(self.cert)
        mine.private_key_pem.write_to_path(self.key)
        self.server = new_apache(port=free_port("127.0.0.1"))
        self.plain = self.server.address
        self.sasl, self.tls = (f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2))
        listeners = f"PLAINTEXT://{self.plain},SASL_SSL://{self.sasl},SSL://{self.tls}"
        controller = f"CONTROLLER://127.0.0.1:{self.server.controller_port}"
        users = " ".join(f'user_{name}="{PASSWORD}"' for name in (WORKER, STRANGER))
        self.server.properties |= {
            "listeners": f"{listeners},{controller}",
            "advertised.listeners": listeners,
            "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
            "listener.name.sasl_ssl.plain.sasl.jaas.config": (
                f"{_LOGIN_MODULE}.plain.PlainLoginModule required {users};"
            ),
            **{
                f"listener.name.sasl_ssl.scram-sha-{bits}.sasl.jaas.config": (
                    f"{_LOGIN_MODULE}.scram.ScramLoginModule required;"
                )
                for bits in (256, 512)
            },
            # Tokens without a signature: the broker's validator for development.
            "listener.name.sasl_ssl.oauthbearer.sasl.jaas.config": (
                f"{_LOGIN_MODULE}.oauthbearer.OAuthBearerLoginModule required "
                'unsecuredLoginStringClaim_sub="broker";'
            ),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(keystore),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.ca),
            "listener.name.ssl.ssl.client.auth": "required",
            "ssl.principal.mapping.rules": "RULE:^.*CN=([^,]+).*$/$1/,DEFAULT",
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:ANONYMOUS;User:{SCRAM_USER}",
            "allow.everyone.if.no.acl.found": "false",
        }
        start_now(self.server)
        self._admin = AdminClient({"bootstrap.servers": self.plain, "log_level": 0})
        changes = [
            UserScramCredentialUpsertion(
                SCRAM_USER, ScramCredentialInfo(mechanism, 4096), PASSWORD.encode()
            )
            for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512)
        ]
        for change in changes:
            for done in self._admin.alter_user_scram_credentials([change]).values():
                done.result(timeout=20)

    def allow(self, user: str, kind: str, name: str, operations: Sequence[str]) -> None:
        """`kind`: topic, group or cluster, as docs/kafka.md has them."""
        bindings = [
            AclBinding(
                {"cluster": ResourceType.BROKER}.get(kind) or ResourceType[kind.upper()],
                "kafka-cluster" if kind == "cluster" else name,
                ResourcePatternType.LITERAL,
                f"User:{user}",
                "*",
                AclOperation[operation],
                AclPermissionType.ALLOW,
            )
            for operation in operations
        ]
        for done in self._admin.create_acls(bindings).values():
            done.result(timeout=20)

    def sasl_options(self, user: str = WORKER, **more: Any) -> dict[str, Any]:
        """Options of a client that logs in with PLAIN; `more` replaces some."""
        return {
            "bootstrap": self.sasl,
            "security_protocol": "SASL_SSL",
            "sasl_username": user,
            "sasl_password": PASSWORD,
            "ssl_cafile": str(self.ca),
            **more,
        }

    def token_options(self, **more: Any) -> dict[str, Any]:
        """Options of a client that logs in with a token."""
        given = self.sasl_options(sasl_mechanism="OAUTHBEARER", **more)
        return {k: v for k, v in given.items() if k not in ("sasl_username", "sasl_password")}

    def tls_options(self, **more: Any) -> dict[str, Any]:
        """Options of a client that shows a certificate."""
        return {
            "bootstrap": self.tls,
            "security_protocol": "SSL",
            "ssl_cafile": str(self.ca),
            "ssl_certfile": str(self.cert),
            "ssl_keyfile": str(self.key),
            **more,
        }

    def close(self) -> None:
        self.server.close()


def _write_keystore(issued: trustme.LeafCert, path: Path) -> None:
    key = load_pem_private_key(issued.private_key_pem.bytes(), None)
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(pem + b"".join(one.bytes() for one in issued.cert_chain_pems))


def unsigned_token(subject: str, now: float, life_s: float = 600) -> str:
    """A JSON web token with `alg` none."""
    claims = {"sub": subject, "iat": now - 1, "exp": now + life_s}
    parts = (json.dumps(part).encode() for part in ({"alg": "none"}, claims))
    return ".".join(urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts) + "."


@contextmanager
def token_endpoint(login: str, token: str) -> Iterator[tuple[str, list[str]]]:
    """An OAuth 2.0 endpoint for client credentials: its URL and the bodies that it was sent."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            given = self.headers.get("Authorization", "").removeprefix("Basic ")
            right = b64decode(given).decode() == login
            answer = {"access_token": token, "expires_in": 600} if right else {"error": "denied"}
            body = json.dumps(answer).encode()
            self.send_response(200 if right else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/token", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
