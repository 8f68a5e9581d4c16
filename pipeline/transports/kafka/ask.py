"""Ask a running service over Kafka.

Who calls it: the registry.
What must stay true: the address means to the client what it means to the source.
"""

from __future__ import annotations

from embedstream_client import KafkaEndpoint
from pipeline.transports.ask import Asker, connect
from pipeline.transports.kafka.options import KafkaOptions


async def open_asker(options: KafkaOptions, *, timeout_s: float) -> Asker:
    """Connected, and at the end of the reply topic. Raises `ConnectionError` and `ValueError`."""
    if options.sasl_oauthbearer_token_endpoint_url is not None:
        raise ValueError(
            "the client takes tokens from a file only: give sasl_token_file instead of "
            "sasl_oauthbearer_token_endpoint_url"
        )
    if options.pattern is not None:
        raise ValueError("a question goes to one topic: name it instead of a pattern")
    endpoint = KafkaEndpoint(
        bootstrap=options.bootstrap,
        topic=options.topics[0],
        reply_topic=options.reply_topic,
        max_request_size=options.max_request_size,
        security_protocol=options.security_protocol,
        sasl_mechanism=options.sasl_mechanism,
        sasl_username=options.sasl_username,
        sasl_password=options.sasl_password,
        sasl_password_file=options.sasl_password_file,
        sasl_token_file=options.sasl_token_file,
        ssl_cafile=options.ssl_cafile,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
        ssl_password=options.ssl_password,
        ssl_check_hostname=options.ssl_check_hostname,
    )
    return await connect(endpoint, timeout_s=timeout_s)
