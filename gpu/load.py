"""From settings to a runner: what an executor thread calls to load a model.

Who calls it: `pipeline/app.py` makes one factory per model; `gpu.executor` calls it on its own thread.
What must stay true: nothing heavy is imported before the factory is called; a setting that makes no
sense is refused by name before anything is read; `phase` says at any time how far the load is.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpu.batch import Runner
from gpu.device.heap import trim_heap
from gpu.device.shape_caches import bound_shape_caches
from gpu.faults import DeviceFault, ModelLoadError
from gpu.folder.families import VISION_FAMILIES
from gpu.folder.hub import resolve_folder
from gpu.folder.read import load_spec
from gpu.folder.spec import ModelSpec
from gpu.folder.static import STATIC_TYPES
from gpu.settings import ModelSettings, model_settings

# transformers changes process-wide state while it loads (torch's default dtype among it).
_LOADING = threading.Lock()


class RunnerFactory:
    """Call it once to load; `phase` may be read from any thread meanwhile.

    offline: never ask a hub (a folder never does anyway). prepack: replace linears by oneDNN ones
    on the CPU; without, a comparison runs on plain ones.
    """

    def __init__(
        self, name: str, settings: ModelSettings, *, offline: bool = True, prepack: bool = True
    ) -> None:
        self.name, self.settings = name, settings
        self.offline, self.prepack = offline, prepack
        self.phase = "waiting"

    def thread_init(self) -> None:
        """Run once by every executor thread before its first job."""
        from gpu.device.pick import init_executor_thread

        init_executor_thread()

    def __call__(self) -> Runner:
        """The runner. Raises `ModelLoadError`. One load at a time in a process."""
        with _LOADING, _without_collection():
            try:
                return self._load()
            except (ModelLoadError, DeviceFault, MemoryError):
                raise
            except BaseException as error:
                # A panic of the tokenizers library is no `Exception`, but a fault of the folder all the same.
                if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                    raise
                line = (str(error).strip().splitlines() or [""])[0][:300]
                raise ModelLoadError(
                    f"model {self.name}: {self.settings.path} cannot be loaded ({self.phase}): "
                    f"{type(error).__name__}: {line}; its files do not fit each other, or are damaged"
                ) from error

    def spec(self) -> ModelSpec:
        """What the folder says, with the settings on top; cheap, and without torch."""
        settings = self.settings
        folder = resolve_folder(
            settings.path,
            offline=self.offline,
            revision=settings.revision,
            allow_pickle=settings.allow_pickle,
            trust_remote_code=settings.trust_remote_code,
        )
        return load_spec(
            folder,
            pooling=None if settings.pooling == "auto" else settings.pooling,
            max_tokens=None if settings.max_tokens == "auto" else settings.max_tokens,
            matryoshka_dimensions=settings.matryoshka_dimensions or None,
            prompts=settings.prompts,
            default_prompt_name=settings.default_prompt_name,
            rerank_template=None
            if settings.rerank_template == "auto"
            else settings.rerank_template,
            label_tokens=settings.label_tokens or None,
            causal=None if settings.causal == "auto" else settings.causal,
            cutoff_layer=None if settings.cutoff_layer == "auto" else settings.cutoff_layer,
            trust_remote_code=settings.trust_remote_code,
            ignore_keys=settings.ignore_keys,
            offline=self.offline,
        )

    def _load(self) -> Runner:
        self._enter("reading folder")
        spec = self.spec()
        self._enter("importing")
        bound_shape_caches()
        if spec.model_type in STATIC_TYPES:
            runner = self._static(spec)
        elif spec.model_type in VISION_FAMILIES:
            runner = self._vision(spec)
        else:
            runner = self._text(spec)
        trim_heap()
        self._enter("ready")
        return runner

    def _text(self, spec: ModelSpec) -> Runner:
        from gpu.encode.folder_tokenizer import load_encoder
        from gpu.model_runner import ModelRunner

        settings = self.settings
        self._enter("loading tokenizer")
        encoder = load_encoder(
            spec,
            empty_input=settings.empty_input,
            trust_remote_code=settings.trust_remote_code,
        )
        return ModelRunner(
            encoder.spec,  # with what only the tokenizer could tell: label ids, the pair prompt
            settings,
            encoder,
            name=self.name,
            prepack=self.prepack,
            on_phase=self._enter,
        )

    def _static(self, spec: ModelSpec) -> Runner:
        """A table of token vectors instead of a transformer."""
        from gpu.forward.static import StaticRunner, load_static_encoder

        self._refuse_text_only()
        self._enter("loading tokenizer")
        encoder = load_static_encoder(spec, empty_input=self.settings.empty_input)
        self._enter("loading weights")
        return StaticRunner(encoder.spec, self.settings, encoder, name=self.name)

    def _vision(self, spec: ModelSpec) -> Runner:
        """A model that takes images."""
        from gpu.encode.images import ImageLimits
        from gpu.encode.vision import load_vision_encoder
        from gpu.forward.vision import VisionRunner

        settings = self.settings
        self._refuse_text_only()
        self._enter("loading tokenizer")
        limits = ImageLimits(settings.max_image_bytes, settings.max_image_pixels)
        encoder = load_vision_encoder(spec, limits=limits, empty_input=settings.empty_input)
        return VisionRunner(
            encoder.spec,
            settings,
            encoder,
            name=self.name,
            prepack=self.prepack,
            on_phase=self._enter,
        )

    def _refuse_text_only(self) -> None:
        for name in ("speed", "cuda_graphs"):
            if (value := getattr(self.settings, name)) != "off":
                raise ModelLoadError(
                    f"model {self.name}: {name} = {value!r} is for text models with a transformer; "
                    "set it to off"
                )

    def _enter(self, phase: str) -> None:
        self.phase = phase


def make_runner_factory(
    name: str, path: str | Path, *, offline: bool = True, prepack: bool = True, **settings: Any
) -> RunnerFactory:
    """A factory for the model at `path` (folder or hub id); settings as in `ModelSettings`.

    Raises `ModelLoadError` for a setting that makes no sense or does not exist.
    """
    try:
        checked = model_settings({"path": str(path), **settings})
    except ModelLoadError as error:
        raise ModelLoadError(f"models.{name}: {error}") from None
    return RunnerFactory(name, checked, offline=offline, prepack=prepack)


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection meanwhile: a load makes a million objects that stay, and collecting among
    them over and over costs a tenth of it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
