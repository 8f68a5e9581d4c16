"""Options of the Kafka transport that say who we are: TLS, SASL, and the schema registry's login.

Who calls it: `options.KafkaOptions` is derived from them; `security` makes a client's settings of them.
What must stay true: as in `pipeline.transports.options`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pipeline.transports.options import Options, says


class LoginOptions(Options, frozen=True, kw_only=True):
    """How a client of the cluster, and of the registry beside it, logs in and encrypts."""

    schema_registry_url: Annotated[
        str | None,
        says(
            "Records and keys that begin with the magic byte are read by this registry's schemas "
            "(extra `schema-registry`)."
        ),
    ] = None
    schema_registry_username: Annotated[str | None, says("Login there.")] = None
    schema_registry_password: Annotated[str | None, says("Login there.")] = None
    schema_registry_password_file: Annotated[
        str | None, says("File that holds the password, instead of the option.")
    ] = None
    schema_registry_cafile: Annotated[
        str | None, says("Certificate authorities of the registry, PEM.")
    ] = None
    security_protocol: Annotated[
        Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"], says("Encryption and login.")
    ] = "PLAINTEXT"
    sasl_mechanism: Annotated[
        Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"],
        says("How the login is sent."),
    ] = "PLAIN"
    sasl_username: Annotated[str | None, says("Login.")] = None
    sasl_password: Annotated[str | None, says("Login.")] = None
    sasl_password_file: Annotated[
        str | None, says("File that holds the password, instead of `sasl_password`.")
    ] = None
    sasl_token_file: Annotated[
        str | None, says("OAUTHBEARER: file with a token, read for each connection.")
    ] = None
    sasl_oauthbearer_token_endpoint_url: Annotated[
        str | None, says("OAUTHBEARER: where client credentials are changed for a token.")
    ] = None
    sasl_oauthbearer_client_id: Annotated[str | None, says("Login there.")] = None
    sasl_oauthbearer_client_secret: Annotated[str | None, says("Login there.")] = None
    sasl_oauthbearer_client_secret_file: Annotated[
        str | None, says("File that holds the secret, instead of the option.")
    ] = None
    sasl_oauthbearer_scope: Annotated[str | None, says("Scope to ask for there.")] = None
    ssl_cafile: Annotated[str | None, says("Certificate authorities, PEM.")] = None
    ssl_certfile: Annotated[str | None, says("Our certificate, PEM.")] = None
    ssl_keyfile: Annotated[str | None, says("Our key, PEM.")] = None
    ssl_password: Annotated[str | None, says("Of the key.")] = None
    ssl_check_hostname: Annotated[bool, says("Whether the certificate must name the host.")] = True

    def login_problems(self) -> list[str]:
        """Contradictions between them."""
        problems: list[str] = []
        bearer = self.sasl_mechanism == "OAUTHBEARER"
        uses_sasl = self.security_protocol.startswith("SASL")
        password = _one_of(self, "sasl_password", "sasl_password_file", problems)
        login = "sasl_oauthbearer_client_secret"
        login_given = _one_of(self, login, f"{login}_file", problems)
        token = _one_of(self, "sasl_token_file", "sasl_oauthbearer_token_endpoint_url", problems)
        if uses_sasl and not bearer and (self.sasl_username is None or not password):
            problems.append(
                f"security_protocol {self.security_protocol} needs sasl_username and "
                "sasl_password or sasl_password_file"
            )
        if uses_sasl and bearer and not token:
            problems.append(
                "sasl_mechanism OAUTHBEARER needs sasl_token_file, or "
                "sasl_oauthbearer_token_endpoint_url with client id and secret"
            )
        endpoint = self.sasl_oauthbearer_token_endpoint_url
        if endpoint is not None:
            if not endpoint.startswith(("https://", "http://")):
                problems.append("sasl_oauthbearer_token_endpoint_url is no http:// or https:// URL")
            if self.sasl_oauthbearer_client_id is None or not login_given:
                problems.append(
                    "sasl_oauthbearer_token_endpoint_url needs sasl_oauthbearer_client_id and "
                    f"{login} or {login}_file"
                )
        if bearer and not uses_sasl:
            problems.append(
                f"sasl_mechanism is OAUTHBEARER but security_protocol is {self.security_protocol}: "
                "choose SASL_SSL"
            )
        if token and not bearer:
            problems.append("a token is set but sasl_mechanism is not OAUTHBEARER")
        if self.sasl_username is not None and (bearer or not uses_sasl):
            problems.append(
                f"sasl_username is set but security_protocol is {self.security_protocol}: "
                "choose SASL_PLAINTEXT or SASL_SSL, or drop sasl_username"
                if not bearer
                else "sasl_username is set but sasl_mechanism is OAUTHBEARER: drop one"
            )
        registry = "schema_registry_password"
        if _one_of(self, registry, f"{registry}_file", problems) and (
            self.schema_registry_username is None
        ):
            problems.append(f"{registry} is set without schema_registry_username")
        url = self.schema_registry_url
        if url is not None and not url.startswith(("https://", "http://")):
            problems.append("schema_registry_url is no http:// or https:// URL")
        if url is not None and "@" in url.partition("://")[2].partition("/")[0]:
            problems.append("schema_registry_url holds a login: give schema_registry_username")
        if self.ssl_certfile is None and self.ssl_keyfile is not None:
            problems.append("ssl_keyfile is set without ssl_certfile: give both or none")
        return problems


def _one_of(options: LoginOptions, one: str, other: str, problems: list[str]) -> bool:
    """Whether one of two options is given; both are a problem."""
    given = [getattr(options, name) is not None for name in (one, other)]
    if all(given):
        problems.append(f"{one} and {other} are both set: give one")
    return any(given)
