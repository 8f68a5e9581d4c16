"""Settings of one model: what an operator may say about it beyond its folder.

Who calls it: `pipeline.settings.records` makes it a table of the settings; `gpu.load` and the runners
read it. The only place where a setting of a model is declared: type, range, meaning, default.
What must stay true: plain values, no torch; a default of "auto", None or an empty list or table means
"as the model folder says".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gpu.faults import ModelLoadError
from schemas.requests import Task


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`[models.NAME]`: one model of the pool."""

    path: Annotated[
        str,
        Meta(
            min_length=1,
            description="Model folder, hub id, or the name of a packaged demo model.",
        ),
    ]
    max_batch_tokens: Annotated[
        Annotated[int, Meta(ge=16, le=4_194_304)] | Literal["auto"],
        Meta(
            description="Tokens a pack may hold; a longer item travels alone. "
            '"auto": 512 on CPU, 16384 on CUDA.',
        ),
    ] = "auto"
    max_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=1_048_576)] | Literal["auto"],
        Meta(
            description="Tokens one item may have, special tokens included. "
            '"auto": what the model folder says.',
        ),
    ] = "auto"
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description='Compute dtype. "auto": float32 on CPU, bfloat16 on CUDA.'),
    ] = "auto"
    speed: Annotated[
        Literal["off", "bf16", "int8"],
        Meta(
            description='Faster products on the CPU for fewer digits. "bf16" needs avx512_bf16 or AMX '
            '(docs/engine.md has its cosine); "int8" is refused, with the reason.',
        ),
    ] = "off"
    linears: Annotated[
        Literal["auto", "onednn", "torch", "mlas"],
        Meta(
            description='Library of matrix products on the CPU in float32. "auto": the fastest one here of '
            "those that keep rows apart, measured once and remembered; name one so that all machines "
            "answer with the same last digits."
        ),
    ] = "auto"
    implementation: Annotated[
        Literal["auto", "transformers"],
        Meta(
            description='Whose code computes the layers. "auto": this engine\'s own for BERT and its kin on the CPU, '
            "which starts sooner; transformers' classes for all others."
        ),
    ] = "auto"
    device: Annotated[
        str,
        Meta(
            pattern=r"^(auto|cpu|cuda|cuda:[0-9]{1,2})$",  # \d would take other scripts' digits
            description='"auto" (CUDA when there is one), "cpu", "cuda" or "cuda:N".',
        ),
    ] = "auto"
    attention: Annotated[
        Literal["auto", "sdpa", "flashinfer", "varlen"],
        Meta(description="Attention backend; `embedstream check` shows the one in use."),
    ] = "auto"
    batch_invariant: Annotated[
        bool,
        Meta(
            description="On CUDA: an item's numbers do not depend on its neighbours, at some cost. "
            "On the CPU in float32 they never do."
        ),
    ] = False
    revision: Annotated[
        str | None,
        Meta(description="Revision of a hub id."),
    ] = None
    pooling: Annotated[
        Literal[
            "auto", "cls", "mean", "last_token", "max", "mean_sqrt_len", "weightedmean", "splade"
        ],
        Meta(description='Pooling of hidden states. "auto": what the model folder says.'),
    ] = "auto"
    matryoshka_dimensions: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=65_536)], ...],
        Meta(description="Vector sizes requests may ask for, beside those the model folder names."),
    ] = ()
    prompts: Annotated[
        dict[str, str],
        Meta(description="Prompts by name, added to (and overriding) those of the model folder."),
    ] = {}
    default_prompt_name: Annotated[
        str | None,
        Meta(description="Prompt of requests that name none."),
    ] = None
    causal: Annotated[
        bool | Literal["auto"],
        Meta(
            description='Whether a decoder attends to earlier tokens only. "auto": what the model '
            "folder says."
        ),
    ] = "auto"
    cutoff_layer: Annotated[
        Annotated[int, Meta(ge=1, le=1000)] | Literal["auto"],
        Meta(
            description="Behind which layer a layerwise reranker (MiniCPM) is read; the layers after it are not "
            'loaded. "auto": the last.'
        ),
    ] = "auto"
    rerank_template: Annotated[
        str | None,
        Meta(
            description='How a language model reads a pair: "qwen3", "bge-gemma", or a template.',
        ),
    ] = None
    label_tokens: Annotated[
        tuple[str, ...],
        Meta(description="Tokens whose logits score a pair or a text, for a language model."),
    ] = ()
    multi_item: Annotated[
        bool,
        Meta(description="Documents of one query share its computation, where the model can."),
    ] = False
    cuda_graphs: Annotated[
        Literal["off", "auto"],
        Meta(
            description='On CUDA: "auto" runs small packs as CUDA graphs, where the model can. Off by '
            "default, because it has not been run on a GPU yet."
        ),
    ] = "off"
    empty_input: Annotated[
        Literal["error", "embed"],
        Meta(description="An empty text: answer `empty_input`, or embed its special tokens."),
    ] = "error"
    max_image_bytes: Annotated[
        int,
        Meta(
            ge=1, le=1_073_741_824, description="Bytes of one image file, for models with images."
        ),
    ] = 16_777_216
    max_image_pixels: Annotated[
        int,
        Meta(
            ge=1,
            le=1_000_000_000,
            description="Width times height of one image, checked before it is decoded.",
        ),
    ] = 40_000_000
    default_for: Annotated[
        tuple[Task, ...],
        Meta(description="Tasks this model answers when neither request nor route names a model."),
    ] = ()
    trust_remote_code: Annotated[
        bool,
        Meta(description="Run Python code that comes with the model folder. Never by default."),
    ] = False
    ignore_keys: Annotated[
        tuple[str, ...],
        Meta(
            description="Keys of the model folder's JSON files that you know to change nothing. Any other "
            "key that is not understood stops the load."
        ),
    ] = ()
    allow_pickle: Annotated[
        bool,
        Meta(description="Load pickled weights (weights only) when there are no safetensors."),
    ] = False


def model_settings(given: dict[str, Any]) -> ModelSettings:
    """Checked settings from plain values; from a file or flags, `pipeline.settings.load` makes them.

    Raises `ModelLoadError` for a setting that makes no sense or does not exist.
    """
    known = ModelSettings.__struct_fields__
    if unknown := sorted(set(given) - set(known)):
        raise ModelLoadError(
            f"unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    try:
        return msgspec.convert(given, ModelSettings)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`").partition("[")[0]
        raise ModelLoadError(f"{name} = {given.get(name)!r}: {reason}") from None
