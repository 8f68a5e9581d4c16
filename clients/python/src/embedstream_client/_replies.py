"""Whether a reply answers the request that was asked.

Who calls it: `AsyncClient`, with every reply that arrived whole.
What must stay true: a reply that passes has one outcome per item that was asked about, in the form that its
task promises.
"""

from __future__ import annotations

from ._wire.requests import (
    AnyRequest,
    ClassifyRequest,
    EmbedRequest,
    RerankRequest,
    ScoreRequest,
)
from ._wire.results import ItemReply, Reply
from .errors import BadReply


def check(reply: Reply, request: AnyRequest) -> None:
    """Every item answered once, and nothing else. Raises `BadReply`."""
    if reply.task != request.task:
        raise BadReply(f"a {request.task} request was answered by {reply.task}", path="$.task")
    n_items = request.n_items
    indexes = {item.index for item in reply.items}
    if len(indexes) != len(reply.items) or not indexes <= set(range(n_items)):
        raise BadReply("two results have one index, or an index is none of the request's")
    n_failed = sum(item.error is not None for item in reply.items)
    n_wanted = n_items - n_failed
    if isinstance(request, RerankRequest) and request.top_n is not None:
        n_wanted = min(n_wanted, request.top_n)
    if len(indexes) - n_failed != n_wanted:
        raise BadReply("the reply lacks results of some items", limit=n_items, given=len(indexes))
    for item in reply.items:
        if item.error is None and not _has_result(item, request):
            raise BadReply("a result is empty", items=[item.index])


def _has_result(item: ItemReply, request: AnyRequest) -> bool:
    if isinstance(request, EmbedRequest):
        return (item.embedding or item.sparse or item.multivector) is not None
    if isinstance(request, ScoreRequest):
        return item.scores is not None or (not request.labels and item.relevance_score is not None)
    found = item.scores if isinstance(request, ClassifyRequest) else item.relevance_score
    return found is not None
