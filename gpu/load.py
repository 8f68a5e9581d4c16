"""From settings to a runner: what an executor thread calls to load a model.

Who calls it: `pipeline/app.py` makes one factory per model; `gpu.executor` calls it on its own thread.
What must stay true: nothing heavy is imported before the factory is called; a setting that makes no
sense is refused by name before anything is read; `phase` says at any time how far the load is.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpu.batch import Runner
from gpu.faults import ModelLoadError
from gpu.folder.families import VISION_FAMILIES
from gpu.folder.read import ModelSpec, load_spec, resolve_folder
from gpu.folder.static import STATIC_TYPES

# transformers changes process-wide state while it loads (torch's default dtype among it).
_LOADING = threading.Lock()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSettings:
    """What an operator may say about one model.

    path: folder or hub id. offline: never ask a hub (a folder never does anyway).
    max_batch_tokens: tokens a pack may hold, or "auto": 512 on the CPU, 16384 on CUDA.
    max_tokens: per item, overrides the folder. dtype: "auto", "float32", "bfloat16", "float16".
    device: "auto", "cpu", "cuda:0". attention, batch_invariant: see `gpu.attention.backends_for`.
    matryoshka_dimensions, pooling, default_prompt_name: override what the folder says; prompts are
    added to the folder's, and override those of the same name. max_image_bytes, max_image_pixels: of
    one image, see `gpu.encode.images`. speed: see `gpu.forward.speed`.
    rerank_template, label_tokens: how a language model reads a pair and which tokens score it, see
    `gpu.folder.rerankers`. multi_item: documents of one query share its computation, see `gpu.forward.shared_prefix`.
    cuda_graphs: "off", or "auto": see `gpu.forward.cuda_graphs`.
    causal: whether a decoder attends to earlier tokens only, where the folder does not say.
    "auto", None and an empty list or map all mean: as the folder says.
    """

    path: str
    max_batch_tokens: int | Literal["auto"] = "auto"
    max_tokens: int | Literal["auto"] | None = None
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    allow_pickle: bool = False
    offline: bool = True
    revision: str | None = None
    attention: str = "auto"
    batch_invariant: bool = False
    empty_input: Literal["error", "embed"] = "error"
    matryoshka_dimensions: tuple[int, ...] | None = None
    pooling: str | None = None
    prompts: Mapping[str, str] | None = None
    default_prompt_name: str | None = None
    prepack: bool = True
    max_image_bytes: int = 16 * 1024 * 1024
    max_image_pixels: int = 40_000_000
    speed: str = "off"
    rerank_template: str | None = None
    label_tokens: tuple[str, ...] | None = None
    multi_item: bool = False
    cuda_graphs: str = "off"
    causal: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        budget = self.max_batch_tokens
        if budget != "auto" and not (isinstance(budget, int) and 1 <= budget <= 2**31 - 1):
            raise ModelLoadError(f'max_batch_tokens = {budget!r} is not "auto" or 1 and more')
        limit = self.max_tokens
        if limit not in (None, "auto") and not (isinstance(limit, int) and limit >= 1):
            raise ModelLoadError(f'max_tokens = {limit!r} is not "auto" or 1 and more')
        if self.empty_input not in ("error", "embed"):
            raise ModelLoadError(f'empty_input = {self.empty_input!r} is not "error" or "embed"')
        for name in ("max_image_bytes", "max_image_pixels"):
            if getattr(self, name) < 1:
                raise ModelLoadError(f"{name} = {getattr(self, name)!r} is not 1 and more")
        if self.speed not in ("off", "bf16", "int8"):
            raise ModelLoadError(f'speed = {self.speed!r} is not "off" or "bf16"')
        if self.cuda_graphs not in ("off", "auto"):
            raise ModelLoadError(f'cuda_graphs = {self.cuda_graphs!r} is not "off" or "auto"')

    def spec(self) -> ModelSpec:
        """What the folder says, with the overrides; cheap, and without torch."""
        return load_spec(
            resolve_folder(
                self.path,
                offline=self.offline,
                revision=self.revision,
                allow_pickle=self.allow_pickle,
                trust_remote_code=self.trust_remote_code,
            ),
            pooling=None if self.pooling == "auto" else self.pooling,
            max_tokens=self.max_tokens if isinstance(self.max_tokens, int) else None,
            matryoshka_dimensions=self.matryoshka_dimensions or None,
            prompts=self.prompts,
            default_prompt_name=self.default_prompt_name,
            rerank_template=None if self.rerank_template == "auto" else self.rerank_template,
            label_tokens=tuple(self.label_tokens or ()) or None,
            causal=None if self.causal == "auto" else self.causal,
            trust_remote_code=self.trust_remote_code,
        )


class RunnerFactory:
    """Call it once to load; `phase` may be read from any thread meanwhile."""

    def __init__(self, name: str, settings: ModelSettings) -> None:
        self.name, self.settings = name, settings
        self.phase = "waiting"

    def thread_init(self) -> None:
        """Run once by every executor thread before its first job."""
        from gpu.model_runner import init_executor_thread

        init_executor_thread()

    def __call__(self) -> Runner:
        """The runner. Raises `ModelLoadError`. One load at a time in a process."""
        with _LOADING:
            return self._load()

    def _load(self) -> Runner:
        self._enter("reading folder")
        spec = self.settings.spec()
        self._enter("importing")
        not_text = spec.model_type in STATIC_TYPES or spec.model_type in VISION_FAMILIES
        if not_text and self.settings.cuda_graphs != "off":
            raise ModelLoadError(
                f"model {self.name}: cuda_graphs is for text models with a transformer; set it to off"
            )
        if spec.model_type in STATIC_TYPES:
            return self._static(spec)
        if spec.model_type in VISION_FAMILIES:
            return self._vision(spec)
        from gpu.encode.load import load_encoder
        from gpu.model_runner import ModelRunner, RunnerSettings

        self._enter("loading tokenizer")
        encoder = load_encoder(
            spec,
            empty_input=self.settings.empty_input,
            trust_remote_code=self.settings.trust_remote_code,
        )
        budget = self.settings.max_batch_tokens
        runner = ModelRunner(
            encoder.spec,  # with what only the tokenizer could tell: label ids, the pair prompt
            RunnerSettings(
                name=self.name,
                device=self.settings.device,
                dtype=self.settings.dtype,
                max_batch_tokens=None if budget == "auto" else budget,
                allow_pickle=self.settings.allow_pickle,
                trust_remote_code=self.settings.trust_remote_code,
                prepack=self.settings.prepack,
                speed=self.settings.speed,
                attention=self.settings.attention,
                batch_invariant=self.settings.batch_invariant,
                multi_item=self.settings.multi_item,
                cuda_graphs=self.settings.cuda_graphs,
            ),
            encoder,
            on_phase=self._enter,
        )
        self._enter("ready")
        return runner

    def _static(self, spec: ModelSpec) -> Runner:
        """A table of token vectors instead of a transformer."""
        from gpu.forward.static import StaticRunner, load_static_encoder

        if self.settings.speed != "off":
            raise ModelLoadError(
                f"model {self.name}: speed = {self.settings.speed!r}; a static model has nothing to speed up"
            )
        self._enter("loading tokenizer")
        encoder = load_static_encoder(spec, empty_input=self.settings.empty_input)
        self._enter("loading weights")
        budget = self.settings.max_batch_tokens
        runner = StaticRunner(
            spec,
            encoder,
            name=self.name,
            device=self.settings.device,
            dtype=self.settings.dtype,
            max_batch_tokens=None if budget == "auto" else budget,
        )
        self._enter("ready")
        return runner

    def _vision(self, spec: ModelSpec) -> Runner:
        """A model that takes images."""
        from gpu.encode.images import ImageLimits
        from gpu.encode.vision import load_vision_encoder
        from gpu.forward.vision import VisionRunner
        from gpu.model_runner import RunnerSettings

        if self.settings.speed != "off":
            raise ModelLoadError(
                f"model {self.name}: speed = {self.settings.speed!r} is for text models; set it to off"
            )
        self._enter("loading tokenizer")
        limits = ImageLimits(self.settings.max_image_bytes, self.settings.max_image_pixels)
        encoder = load_vision_encoder(spec, limits=limits, empty_input=self.settings.empty_input)
        budget = self.settings.max_batch_tokens
        runner = VisionRunner(
            spec,
            RunnerSettings(
                name=self.name,
                device=self.settings.device,
                dtype=self.settings.dtype,
                max_batch_tokens=None if budget == "auto" else budget,
                allow_pickle=self.settings.allow_pickle,
                prepack=self.settings.prepack,
                attention=self.settings.attention,
                batch_invariant=self.settings.batch_invariant,
            ),
            encoder,
            on_phase=self._enter,
        )
        self._enter("ready")
        return runner

    def _enter(self, phase: str) -> None:
        self.phase = phase


def make_runner_factory(name: str, path: str | Path, **settings: Any) -> RunnerFactory:
    """A factory for the model at `path` (folder or hub id); settings as in `ModelSettings`.

    Raises `ModelLoadError` for a setting that makes no sense or does not exist.
    """
    known = {slot for slot in ModelSettings.__slots__ if slot != "path"}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ModelLoadError(
            f"models.{name}: unknown setting {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    try:
        return RunnerFactory(name, ModelSettings(path=str(path), **settings))
    except ModelLoadError as error:
        raise ModelLoadError(f"models.{name}.{error}") from error
