"""The files of a model folder, read strictly: JSON objects and safetensors headers, and why one cannot be used.

The problem. A download that broke off, a Git LFS pointer, a pickle, a header with absurd lengths: libraries refuse them
in words that name neither the file nor what to do.

The idea. Read little, and explain: the header alone says whether a file of many gigabytes can be complete.

    | 8 bytes: length | JSON: name -> dtype, shape, data_offsets | data ...          the last offset must be in the file

Nothing is ever unpickled. Left out: the tensors themselves (checkpoint.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from formats import gguf
from formats.config import CheckpointError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
QUANT_KEY = "vitrine_quant"  # metadata entry of the safetensors files that quantize.py writes

LFS_REFUSAL = "{} is a Git LFS pointer, not the file itself: run `git lfs pull` in its repository."
PICKLE_REFUSAL = (
    "{} is a pickle, which can run any code when it is opened: never read here. Convert it on a machine where that is "
    "acceptable: transformers' AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)."
)


def some_of(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def read_json(path: Path, absent: str = "") -> dict:
    """A JSON object. A file that is not there is refused with `absent`; without such a text it is an empty object."""
    if not path.is_file():
        if not absent:
            return {}
        raise CheckpointError(absent)
    raw = path.read_bytes()
    if raw.startswith(gguf.LFS_POINTER):
        raise CheckpointError(LFS_REFUSAL.format(path))
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}): fetch it again.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__} where an object was expected.")
    return content


def read_header(path: Path) -> tuple[dict[str, tuple[tuple[int, ...], str]], dict | None]:
    """({name: (shape, dtype)}, scheme of quantize.py or None) of a safetensors file, which is checked on the way."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            header = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
            quant = (file.metadata() or {}).get(QUANT_KEY)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(_explain(path, error)) from error
    try:
        quant = json.loads(quant or "null")
        if quant is not None and not (type(quant["version"]) is int and isinstance(quant["scheme"], str)):
            raise TypeError("version and scheme must be a number and a name")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: its {QUANT_KEY} metadata is damaged ({error!r}): quantise again.") from error
    return header, quant


def _explain(path: Path, error: Exception) -> str:
    """Why the safetensors library refused a file. Its messages name neither file nor tensor."""
    if not path.is_file():
        return f"{path} is not a file ({error})."
    with open(path, "rb") as file:
        head, size = file.read(64), path.stat().st_size
        length = int.from_bytes(head[:8], "little")
        if head.startswith(gguf.LFS_POINTER):
            return LFS_REFUSAL.format(path)
        if size < 8 or length > size - 8:
            return f"{path}: its header claims {length} bytes, the file has {size}: truncated or not safetensors."
        file.seek(8)
        try:
            table = json.loads(file.read(length))
            ends = {name: 8 + length + entry["data_offsets"][1] for name, entry in table.items() if name[:2] != "__"}
            last = max(ends, key=ends.get)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            return f"{path}: its header is damaged, or it is not a safetensors file ({error}): fetch it again."
    if ends[last] > size:
        return f"{path} is truncated: tensor {last!r} ends at byte {ends[last]} of {size}: fetch it again."
    return f"{path} is damaged ({error}): fetch it again."


def no_config(path: Path) -> str:
    files = [f.name for f in sorted(path.glob("*.gguf"))]
    hint = f"name one of its GGUF files: {some_of(files)}" if files else "is it a transformers model folder?"
    return f"{path} has no config.json: {hint}"


def no_weights(path: Path, files: list[Path]) -> str:
    if files:
        return f"{path} holds {len(files)} safetensors files and no model.safetensors.index.json: fetch the index too."
    pickles = [f for f in sorted(path.iterdir()) if f.suffix in PICKLES]
    return PICKLE_REFUSAL.format(pickles[0]) if pickles else f"{path} holds no weights: no *.safetensors is there."
