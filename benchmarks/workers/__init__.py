"""What a user would write instead of a service: one worker for each library, as its documentation advises.

Who calls it: `benchmarks.alternatives`, each in a process of its own; where it connects and which model it loads
stands in the environment (`BENCH_*`).
What must stay true: the same model, records and replies for all; nothing tuned beyond what the page that each
file names says; each settles after its reply, where its library can.
"""

from __future__ import annotations

import os
from typing import Any

import msgpack

ADDRESS = os.environ.get("BENCH_ADDRESS", "")
REQUESTS = os.environ.get("BENCH_REQUESTS", "")
REPLIES = os.environ.get("BENCH_REPLIES", "")
GROUP = os.environ.get("BENCH_GROUP", "")


def load() -> Any:
    """The model, on the CPU."""
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(os.environ["BENCH_MODEL"], device="cpu")


def text_of(body: bytes) -> tuple[str, str]:
    """Request id and its one text."""
    request = msgpack.unpackb(body)
    return request["id"], request["input"][0]


def reply_of(request_id: str, vector: Any) -> bytes:
    """A reply record."""
    reply: bytes = msgpack.packb({"id": request_id, "embedding": vector.tobytes()})
    return reply
