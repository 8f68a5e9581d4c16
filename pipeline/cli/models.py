"""`models list` and `models fetch`.

Who calls it: `pipeline.cli.commands`.
What must stay true: thin; everything about the models themselves is in `pipeline.demo.fetch`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.cli.console import byte_progress, note_error, out_console
from pipeline.lifecycle import ExitStatus


def list_() -> int:
    """One row per packaged model."""
    from rich.table import Table
    from rich.text import Text

    from pipeline.demo.fetch import is_fetched, list_models, models_root

    table = Table("name", "task", "size", "licence", "here", "what", box=None, pad_edge=False)
    for model in list_models():
        table.add_row(
            Text(model.name),
            model.task,
            f"{model.model_bytes / 1e6:.0f} MB",
            model.licence,
            "yes" if is_fetched(model) else "no",
            Text(model.summary),
        )
    out = out_console()
    out.print(table)
    out.out(f"\nfolder: {models_root()}")
    return ExitStatus.OK


def fetch(names: Sequence[str]) -> int:
    """Fetch the named models, or the demo's two; every failure is told."""
    from pipeline.demo.catalog import demo_models
    from pipeline.demo.fetch import ModelFetchError, ensure_model

    status = ExitStatus.OK
    for name in names or list(demo_models()):
        try:
            with byte_progress() as progress:
                folder = ensure_model(name, progress=progress)
        except ModelFetchError as error:
            note_error(str(error))
            status = ExitStatus.ERROR
        else:
            out_console().out(str(folder))
    return status
