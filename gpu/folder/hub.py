"""From a path or a hub id to a local folder.

Who calls it: `gpu.load`, before anything is read.
What must stay true: a folder that exists never causes a connection attempt; pickled weights and code
are fetched only when they may be used.
"""

from __future__ import annotations

import re
from pathlib import Path

from gpu.faults import ModelLoadError


def resolve_folder(
    path: str,
    *,
    offline: bool = True,
    revision: str | None = None,
    allow_pickle: bool = False,
    trust_remote_code: bool = False,
) -> Path:
    """The local folder for a path or a hub id.

    A folder that exists is used as it is, without any connection. Anything else is a hub id, looked
    up in the local hub cache, and downloaded only when `offline` is False. Pickled weights and code
    are fetched only when they may be used.
    """
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelLoadError(f"models path {path}: it is a file; name the folder that holds it")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path):
        raise ModelLoadError(f"models path {path}: no such folder")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*_linear.pt"]  # * also matches /
    patterns += ["*.bin"] if allow_pickle else []
    patterns += ["*.py"] if trust_remote_code else []
    try:
        return Path(
            snapshot_download(
                path, revision=revision, local_files_only=offline, allow_patterns=patterns
            )
        )
    except Exception as error:
        how = (
            "it is not in the local hub cache and the service is offline; "
            "give a folder, or set `offline = false`"
            if offline
            else f"the hub did not give it ({type(error).__name__}); give a local folder"
        )
        raise ModelLoadError(f"models path {path}: no such folder, and {how}") from error
