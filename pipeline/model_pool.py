"""Loading the model pool: names and folders in, a running executor and its models out.

Who calls it: `pipeline.app` before anything is taken from a broker; `embedstream check`.
What must stay true: a model that does not load stops the service with one line that names the
model, the setting and the remedy; nothing is left running then.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import structlog

from gpu.batch import ModelInfo, Runner
from gpu.device.cores import cpu_limit, n_threads, usable_cores
from gpu.executor import ModelExecutor
from gpu.faults import ModelLoadError
from gpu.load import RunnerFactory
from pipeline.demo.fetch import ModelFetchError, fetch_model
from pipeline.lifecycle import ExitStatus, OperatorError
from pipeline.settings.load import ModelSettings, Settings

log = structlog.get_logger(__name__)

EXECUTOR_CLOSE_S = 2.0
"""A forward that is running cannot be interrupted; after this its thread is left to the exit."""


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """The executor and what it holds."""

    executor: ModelExecutor
    runners: dict[str, Runner]
    infos: dict[str, ModelInfo]

    def close(self, timeout_s: float = EXECUTOR_CLOSE_S) -> None:
        """Stop threads and drop models."""
        self.executor.close(timeout_s)


def executor_workers(settings: Settings) -> int:
    """Executor threads: one on CUDA, which runs batches one after the other; on the CPU the
    setting, else the cores that this process may use, as far as its CPU limit goes.

    Raises:
        OperatorError: models on the CPU beside models on CUDA, a process serves one device; several
            processes on a device that nobody named.
    """
    kinds = {_device_kind(name, model) for name, model in settings.models.items()}
    if len(kinds) > 1:
        raise OperatorError(
            "models on cpu and on cuda in one process: set models.*.device to one of the two, or "
            "run a second service for the other",
            exit_status=ExitStatus.USAGE,
        )
    if kinds == {"cuda"}:
        _refuse_unmeant_copies(settings)
        return 1
    configured = settings.executor.cpu_workers
    if configured != "auto":
        return configured
    return n_threads(len(usable_cores()))


def _refuse_unmeant_copies(settings: Settings) -> None:
    n = settings.executor.processes
    unmeant = [name for name, model in settings.models.items() if model.device == "auto"]
    if n > 1 and unmeant:
        raise OperatorError(
            f'models.{unmeant[0]}.device is "auto", which is one CUDA device here, and each of the {n} of '
            'executor.processes would load its own copy there: set device to "cuda:0" if that is meant, or '
            "processes to 1",
            exit_status=ExitStatus.USAGE,
        )


def _device_kind(name: str, model: ModelSettings) -> str:
    if model.device == "cpu":
        return "cpu"
    from gpu.device.pick import pick_device  # brings torch: not before somebody loads a model

    try:
        return pick_device(model.device).type
    except ModelLoadError as error:
        raise OperatorError(f"models.{name}.{error}", exit_status=ExitStatus.USAGE) from error


async def load_models(
    settings: Settings,
    *,
    factories: Mapping[str, Callable[[], Runner]] | None = None,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> LoadedModels:
    """Fetch what is packaged, load every model on the executor, warm it up.

    Args:
        factories: runners by name instead of the settings' models (tests, benchmarks).

    Raises:
        OperatorError: a model cannot be had or does not load.
    """
    if factories is None:
        if importlib.util.find_spec("torch") is None:
            raise OperatorError(
                "torch is not installed, and models run on it: pip install torch, with --index-url "
                'for another build than pip\'s own (README.md, "With a GPU")'
            )
        if not settings.models:
            raise OperatorError(
                "no model is configured: add [models.NAME] with a path, or run "
                "`embedstream models fetch`",
                exit_status=ExitStatus.USAGE,
            )
        factories = {
            name: await _factory(name, model, on_phase) for name, model in settings.models.items()
        }
    workers = await asyncio.to_thread(executor_workers, settings)
    log.info("executor_threads", threads=workers, cores=len(usable_cores()), cpu_limit=cpu_limit())
    executor = ModelExecutor(factories, workers=workers)
    loaded = LoadedModels(executor, {}, {})
    try:
        for name in factories:
            on_phase(f"loading model {name}")
            runner = await _load(executor, name)
            loaded.runners[name] = runner
            loaded.infos[name] = runner.info
            log.info(
                "model_loaded",
                model=name,
                architecture=runner.info.architecture,
                dtype=runner.info.dtype,
                packed=runner.info.packed,
                max_batch_tokens=runner.info.max_batch_tokens,
            )
            for note in runner.info.notes:
                log.info("model_note", model=name, note=note)
    except BaseException:
        loaded.close(0.0)  # a load cannot be interrupted, and nobody waits for its model
        raise
    return loaded


async def _factory(
    name: str, model: ModelSettings, on_phase: Callable[[str], None]
) -> Callable[[], Runner]:
    on_phase(f"fetching model {name}")
    try:
        path = await fetch_model(model.path)
    except ModelFetchError as error:
        raise OperatorError(f"models.{name}.path: {error}") from error
    return RunnerFactory(name, msgspec.structs.replace(model, path=path), offline=False)


async def _load(executor: ModelExecutor, name: str) -> Runner:
    try:
        return await asyncio.wrap_future(executor.load(name))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise OperatorError(
            f"models.{name} does not load: {type(error).__name__}: {reason[:400]}"
        ) from error
