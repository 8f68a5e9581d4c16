"""Settings of results that are kept: types of `[batching]`, with the sentences of their documentation.

Who calls it: `pipeline.settings.records`.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

ResultCacheBytes: TypeAlias = Annotated[
    int,
    Meta(
        ge=0,
        le=1 << 40,
        description="Memory for results of items computed lately: the same item (its tokens, and all that "
        "decides its result) gets the same bytes without a forward, in whichever request it comes; 0: "
        "each one is computed.",
    ),
]
ResultCacheUrl: TypeAlias = Annotated[
    str | None,
    Meta(
        description="A Redis behind that memory, redis://[user:password@]host[:port][/db] (rediss:// for TLS): "
        "results that processes with the same model files share. Asked for bulk items only; one that is "
        "down, slow or full is done without."
    ),
]
ResultCacheTtl: TypeAlias = Annotated[
    int, Meta(ge=1, le=315_360_000, description="How long a result stays in that Redis.")
]
