"""`models list` and `models fetch`.

Who calls it: `pipeline.cli.commands`.
What must stay true: thin; everything about the models themselves is in `pipeline.demo.fetch`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.cli.console import byte_progress, note_error, out_console
from pipeline.lifecycle import ExitStatus


def list_() -> int:
    """Two lines per packaged model, within 60 columns but for what it is."""
    from rich.padding import Padding
    from rich.text import Text

    from pipeline.demo.fetch import is_fetched, list_models, models_root

    out = out_console()
    for model in list_models():
        here = "here" if is_fetched(model) else "not here"
        size = f"{model.model_bytes / 1e6:.0f} MB"
        out.out(f"{model.name:<23} {model.task:<6} {size:>6}  {model.licence:<10} {here}")
        out.print(Padding(Text(model.summary), (0, 0, 0, 2), expand=False))
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
