"""Is this request something this model can do? Pure checks of fields against a `ModelSpec`.

Who calls it: `gpu.tokenizer`, before any text is tokenized.
What must stay true: a request that passes can be computed as asked; nothing is silently dropped or
replaced (a size, an output, an instruction); every refusal says what would be accepted.
"""

from __future__ import annotations

from schemas.errors import InvalidDimensions, Unsupported
from schemas.requests import AnyRequest, ClassifyRequest, EmbedRequest, Task

from .artifacts import ModelSpec
from .batch import ItemOptions


def check_request(request: AnyRequest, spec: ModelSpec) -> ItemOptions:
    """The options of the request's items.

    Raises `Unsupported` (task, output, instruction) or `InvalidDimensions`.
    """
    task = request.task
    if task not in spec.tasks:
        raise Unsupported(_why_not(task, spec), path="$.task")
    if isinstance(request, EmbedRequest):
        unknown = [output for output in request.outputs if output != "dense"]
        if unknown:
            raise Unsupported(
                f"the model has no {', '.join(unknown)} output; it has: dense", path="$.outputs"
            )
        return ItemOptions(
            task=task,
            outputs=request.outputs,
            dimensions=_dimensions(request.dimensions, spec),
            normalize=request.normalize,
        )
    if not isinstance(request, ClassifyRequest) and request.instruction is not None:
        raise Unsupported("the model takes no instruction", path="$.instruction")
    return ItemOptions(task=task, raw_scores=request.raw_scores)


def _why_not(task: Task, spec: ModelSpec) -> str:
    if spec.head and task in ("rerank", "score"):
        return (
            f"the model has {len(spec.labels)} labels ({', '.join(spec.labels[:8])}), so a pair has no "
            "single score; ask `classify` for all labels"
        )
    able = ", ".join(sorted(spec.tasks))
    return f"the model cannot {task}; it can: {able}"


def _dimensions(asked: int | None, spec: ModelSpec) -> int | None:
    """None for the native size. Anything but an allowed size is refused."""
    native = spec.dimensions
    if asked is None or asked == native:
        return None
    allowed = spec.allowed_dimensions or ((native,) if native is not None else ())
    if asked in allowed:
        return asked
    contiguous = len(allowed) > 2 and allowed == tuple(range(allowed[0], allowed[-1] + 1))
    told = f"{allowed[0]} to {allowed[-1]}" if contiguous else ", ".join(map(str, allowed))
    raise InvalidDimensions(
        f"dimensions can be {told} for this model", path="$.dimensions", given=asked, limit=native
    )
