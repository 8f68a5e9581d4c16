"""How many compiled products oneDNN keeps: one for each shape and number of rows, of which packs have hundreds.

Who calls it: `gpu.load`, before anything is computed.
What must stay true: what is kept is bounded by numbers given here and not by how many executor threads there
are; a number that the environment names is left as it is. Both libraries read theirs once, at first use.
"""

from __future__ import annotations

import os
import platform
from collections.abc import MutableMapping

KEPT = "256"
"""Of the process. A product takes two places and some 0.6 MB (measured, torch 2.13 with AVX2), so that 128 products,
75 MB, stay: a model of three shapes has 42 numbers of rows. One that is not kept costs 0.4 ms once a pack."""
KEPT_BY_THREAD = "16"
"""Of each thread: descriptions, 0.28 MB each, which cost nothing to make while the product is kept."""


def bound_shape_caches(environ: MutableMapping[str, str] = os.environ) -> None:
    """Bound oneDNN's own cache and that of torch's layer above it; by default each holds 1,024.

    torch's is left alone but on x86-64: elsewhere it may hold weights, one entry for each layer.
    """
    if not {"ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY"} & environ.keys():
        environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = KEPT
    if platform.machine() in ("x86_64", "AMD64"):
        environ.setdefault("LRU_CACHE_CAPACITY", KEPT_BY_THREAD)
