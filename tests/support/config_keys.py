"""Writes `gpu/folder/config_keys.py`: what transformers' classes read from config.json.

Who calls it: a developer who adds a family or moves the pin of transformers
(`python -m tests.support.config_keys`), and the test that holds the file to the installed version.
What must stay true: names are taken from the config class (fields, renames) and from the source of the
config and model modules, so that a field read without being declared counts too.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from textwrap import fill

TARGET = Path(__file__).parents[2] / "gpu" / "folder" / "config_keys.py"
_READ = re.compile(
    r"config\.([a-z]\w*)\b(?!\()|getattr\((?:self\.)?config, *\"(\w+)\"|kwargs\.(?:pop|get)\(\"(\w+)\""
)
_NOT_KEYS = {"cache", "image_grid_thw", "video_grid_thw", "mm_token_type_ids", "token_type_ids"}
_HEADER = '''"""Keys of config.json that transformers' class of a model type reads. Written by
`python -m tests.support.config_keys`; a test holds it to the installed transformers.

Who calls it: `gpu.folder.keys`.
What must stay true: generated, never edited by hand; a sub-config is named TYPE.KEY.
"""

from __future__ import annotations

READ_BY_ALL = """
{common}
"""

READ_BY_TYPE = {{
{rows}}}
'''


def read_keys() -> tuple[set[str], dict[str, set[str]]]:
    """(read for every model type, read for each one beside those)."""
    from transformers import PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from gpu.folder.families import FAMILIES, VISION_FAMILIES

    stand_ins = {"llama_bidirec": "llama"}
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    found: dict[str, set[str]] = {}
    for model_type in sorted({**FAMILIES, **VISION_FAMILIES}):
        known = stand_ins.get(model_type, model_type)
        if known not in CONFIG_MAPPING:
            continue  # its class comes with the folder
        config_class = CONFIG_MAPPING[known]
        found[model_type] = _of(config_class) - common
        for name, sub in (config_class.sub_configs or {}).items():
            if hasattr(sub, "model_type") and sub.model_type:
                found[f"{model_type}.{name}"] = _of(sub) - common
    return common, found


def _of(config_class: type) -> set[str]:
    fields = {field.name for field in dataclasses.fields(config_class)}  # type: ignore[arg-type]
    renamed = getattr(config_class, "attribute_map", {})
    names = fields | set(renamed) | set(renamed.values())
    folder = Path(str(sys.modules[config_class.__module__].__file__)).parent
    for path in sorted(folder.glob("*.py")):
        if path.name.startswith(("modeling_", "configuration_")):
            for match in _READ.findall(path.read_text(encoding="utf-8")):
                names.update(name for name in match if name)
    if "rope_parameters" in names:  # older spellings, converted for every class that has it
        names |= {"rope_scaling", "rope_theta", "partial_rotary_factor"}
        names.add("original_max_position_embeddings")
    return names - _NOT_KEYS


def render() -> str:
    """The text of the file."""
    common, found = read_keys()
    rows = "".join(f'    "{name}": """\n{_lines(keys)}\n""",\n' for name, keys in found.items())
    return _HEADER.format(common=_lines(common), rows=rows)


def _lines(names: set[str]) -> str:
    return fill(" ".join(sorted(names)), width=98, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
