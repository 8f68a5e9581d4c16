"""Is this request something this model can do? Pure checks of fields against a `ModelSpec`.

Who calls it: `gpu.encode.text`, before any text is tokenized.
What must stay true: a request that passes can be computed as asked; nothing is silently dropped or
replaced (a size, an output, an instruction); every refusal says what would be accepted.
"""

from __future__ import annotations

from gpu.batch import ItemOptions
from gpu.encode.long_texts import check_long
from gpu.folder.spec import ModelSpec
from schemas.errors import InvalidDimensions, Unsupported
from schemas.requests import (
    AnyRequest,
    ClassifyRequest,
    EmbedRequest,
    Output,
    RerankRequest,
    ScoreRequest,
    Task,
)


def check_request(request: AnyRequest, spec: ModelSpec) -> ItemOptions:
    """The options of the request's items.

    Raises `Unsupported` (task, output, instruction) or `InvalidDimensions`.
    """
    task = request.task
    if task not in spec.tasks:
        raise Unsupported(_why_not(task, spec), path="$.task")
    if isinstance(request, EmbedRequest):
        outputs = _outputs(request, spec)
        check_long(request, outputs, spec)
        return ItemOptions(
            task=task,
            outputs=outputs if request.chunk_tokens is None else (),
            chunk_tokens=request.chunk_tokens,
            dimensions=_dimensions(request.dimensions, outputs, spec),
            normalize=request.normalize,
        )
    if isinstance(request, RerankRequest) and (spec.pairs or spec.multivector) is not None:
        _no_ids(request)
    _check_labels(request, spec)
    takes_instruction = isinstance(request, ClassifyRequest) or spec.pairs is not None
    if not takes_instruction and request.instruction is not None:  # type: ignore[union-attr]
        raise Unsupported("the model takes no instruction", path="$.instruction")
    return ItemOptions(task=task, raw_scores=request.raw_scores)


def _check_labels(request: AnyRequest, spec: ModelSpec) -> None:
    named = isinstance(request, ScoreRequest) and request.labels
    if named and spec.label_head is None:
        raise Unsupported(
            "the model is read at no tokens of a vocabulary, so a request cannot name labels; a causal language "
            "model with `rerank_template` takes them",
            path="$.labels",
        )
    if not named and spec.label_head is not None and not spec.label_head.tokens:
        raise Unsupported("the model has no labels of its own; name them", path="$.labels")


def _no_ids(request: RerankRequest) -> None:
    where = "$.query" if not isinstance(request.query, str) else None
    odd = [i for i, document in enumerate(request.documents) if document.ids is not None]
    if where or odd:
        raise Unsupported(
            "this model's texts stand inside words or tokens of its own, which join them; send texts",
            path=where or f"$.documents[{odd[0]}]",
        )


def _why_not(task: Task, spec: ModelSpec) -> str:
    if spec.head and task in ("rerank", "score"):
        return (
            f"the model has {len(spec.labels)} labels ({', '.join(spec.labels[:8])}), so a pair has no "
            "single score; ask `classify` for all labels"
        )
    able = ", ".join(sorted(spec.tasks))
    return f"the model cannot {task}; it can: {able}"


def _outputs(request: EmbedRequest, spec: ModelSpec) -> tuple[Output, ...]:
    """The outputs to compute; the model's first when the request names none."""
    outputs = request.outputs or spec.outputs[:1]
    unknown = [output for output in outputs if output not in spec.outputs]
    if unknown:
        raise Unsupported(
            f"the model has no {', '.join(unknown)} output; it has: {', '.join(spec.outputs)}",
            path="$.outputs",
        )
    if outputs == ("sparse",) and request.normalize:
        raise Unsupported("sparse weights are never normalised", path="$.normalize")
    return outputs


def _dimensions(asked: int | None, outputs: tuple[Output, ...], spec: ModelSpec) -> int | None:
    """None for the native size. Anything but an allowed size is refused.

    A size speaks of the dense vector where there is one, else of each token-level vector.
    """
    native = spec.dimensions
    if native is None and spec.multivector is not None:
        native = spec.multivector.dimensions
    elif "dense" not in outputs and asked is not None and asked != native:
        raise InvalidDimensions(
            f"dimensions cut the dense vector, and {', '.join(outputs)} alone was asked for",
            path="$.dimensions",
            given=asked,
            limit=native,
        )
    if asked is None or asked == native:
        return None
    if "dense" in outputs and "multivector" in outputs:
        raise InvalidDimensions(
            "dimensions cut the dense vector alone; ask for multivector in a request of its own",
            path="$.dimensions",
            given=asked,
            limit=native,
        )
    allowed = spec.allowed_dimensions or ((native,) if native is not None else ())
    if asked in allowed:
        return asked
    contiguous = len(allowed) > 2 and allowed == tuple(range(allowed[0], allowed[-1] + 1))
    told = f"{allowed[0]} to {allowed[-1]}" if contiguous else ", ".join(map(str, allowed))
    raise InvalidDimensions(
        f"dimensions can be {told} for this model", path="$.dimensions", given=asked, limit=native
    )
