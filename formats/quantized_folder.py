"""A quantised model as a folder: what `python quantize.py --model M --quant int4 --out DIR` writes.

The problem. Quantising takes time and needs the big file; both should be paid once. And a folder must say for itself
how its weights are stored: a scheme that lives in a file name is lost with the first rename.

The idea. An ordinary Hugging Face folder, whose one safetensors file holds, for each quantised weight, its parts under
the name of the layer, and the scheme as metadata in the file's own header:

    DIR/config.json, generation_config.json, tokenizer.json, ...
    DIR/model.safetensors
      +--------+----------------------------------------------------+-----------------------------------------+
      | length | JSON: "__metadata__": {"vitrine_quant": "{...}"},  | data, widest dtype first, so that every |
      | 8 byte | name -> dtype, shape, where it lies in the data    | tensor lies aligned                     |
      +--------+----------------------------------------------------+-----------------------------------------+

Every size is known before the first weight is read (`Scheme.layout`), so the header goes first, and a model of any size
needs memory for one layer. The folder takes its name at the very end: a full disk leaves nothing that looks complete.

Source: the safetensors format. Left out: shards, and the layouts that other engines use for quantised weights.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from checkpoint import Checkpoint, ModelConfig, open_checkpoint
from formats.command_line import as_command, warn
from formats.families import from_hf
from formats.folder_files import QUANT_KEY
from formats.layers import load_rows, scheme_for
from quantize import VERSION, Scheme, parse_scheme
from tokenizer import Tokenizer

WEIGHTS = "model.safetensors"
COPIED = (  # beside the weights: everything that is needed to use the model
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates",
)
DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}
Entry = tuple[torch.dtype, tuple[int, ...]]
Progress = Callable[[int, int], None]  # (bytes written, bytes in all)


def save_quantized(
    model: str | Path, scheme: str, out: str | Path, force: bool = False, progress: Progress = lambda done, total: None
) -> Path:
    """Quantise `model` under `scheme` into the folder `out`.

    Raises ValueError if the scheme is unknown, the model is quantised already, a weight is NaN, or `out` is in the way,
    and OSError if writing fails; `out` is then what it was before.
    """
    wanted, out = parse_scheme(scheme), Path(out)
    check_target(out, force)
    ckpt = open_checkpoint(model)
    if ckpt.quant is not None:
        raise ValueError(f"{ckpt.path} is quantised already ({ckpt.quant['scheme']}); quantise the original instead")
    partial = out.with_name(f"{out.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        write_weights(ckpt, wanted, partial / WEIGHTS, progress)
        write_companions(ckpt, partial)
        replaced = out.with_name(f"{out.name}.replaced-{os.getpid()}")
        if out.exists():
            out.rename(replaced)
        partial.rename(out)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return out


def check_target(out: Path, force: bool) -> None:
    """Refuse to write over anything but a folder of our own making, and over that without `force`."""
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"{out} is a file; --out names a folder to create")
    files = {p.name for p in out.iterdir()}
    if not files:
        return
    if not files <= {WEIGHTS, *COPIED} or QUANT_KEY not in file_metadata(out / WEIGHTS):
        raise ValueError(f"{out} holds other files than this command writes and is left alone; choose another --out")
    if not force:
        raise ValueError(f"{out} exists; choose another --out, or add --force to replace it")


def file_metadata(path: Path) -> dict[str, str]:
    """The metadata of a safetensors file; empty if there is none or it is no such file."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}
    except (OSError, SafetensorError):
        return {}


# The weights


def layer_of(name: str) -> str:
    """The layer that a weight becomes part of: q, k and v are one, gate and up are one (model.py)."""
    return re.sub(r"(?:gate|up)_proj", "gate_up", re.sub(r"[qkv]_proj", "qkv", name))


def write_weights(ckpt: Checkpoint, scheme: Scheme, path: Path, progress: Progress) -> None:
    """The safetensors file: first the header, then each tensor at the place the header gave it."""
    layers: dict[str, list[str]] = {}  # layer -> the weights in it
    for name in ckpt.names():
        if len(ckpt.shape(name)) == 2:
            layers.setdefault(layer_of(name), []).append(name)
    dense = {name: ckpt.tensor(name) for name in ckpt.names() if len(ckpt.shape(name)) != 2}  # norms and biases: small
    entries: dict[str, Entry] = {name: (t.dtype, tuple(t.shape)) for name, t in dense.items()}
    for names in layers.values():
        form = scheme_for(ckpt, names, scheme)
        for name in names:
            for suffix, entry in form.layout(*ckpt.shape(name)).items():
                entries[f"{name.removesuffix('.weight')}.{suffix}"] = entry
    shapes = {name.removesuffix(".weight"): ckpt.shape(name) for names in layers.values() for name in names}
    about = {"bits": scheme.bits, "group_size": scheme.group_size, "scheme": scheme.name}
    header, places = make_header(entries, json.dumps({"version": VERSION, **about, "shapes": shapes}))
    total, done = sum(prod(shape) * dtype.itemsize for dtype, shape in entries.values()), 0
    with open(path, "wb") as file:
        file.write(header)
        for name, tensor in dense.items():
            done += write_at(file, len(header) + places[name], tensor)
        for names in layers.values():
            for name, rows in zip(names, load_rows(ckpt, names, scheme), strict=True):
                for suffix, part in rows.parts.items():
                    place = places[f"{name.removesuffix('.weight')}.{suffix}"]
                    done += write_at(file, len(header) + place, part)
            progress(done, total)
        file.flush()
        os.fsync(file.fileno())  # some file systems report a full disk only here


def make_header(entries: dict[str, Entry], quant: str) -> tuple[bytes, dict[str, int]]:
    """(the file's first bytes, where each tensor starts behind them). Wide dtypes first keep every tensor aligned."""
    table, places, at = {"__metadata__": {QUANT_KEY: quant}}, {}, 0
    for name in sorted(entries, key=lambda name: (-entries[name][0].itemsize, name)):
        dtype, shape = entries[name]
        places[name], end = at, at + prod(shape) * dtype.itemsize
        table[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, places


def write_at(file: BinaryIO, offset: int, tensor: torch.Tensor) -> int:
    """Write the tensor's bytes at `offset`; returns how many they are."""
    file.seek(offset)
    return file.write(tensor.contiguous().flatten().view(torch.uint8).numpy())


# Everything else


def write_companions(ckpt: Checkpoint, folder: Path) -> None:
    """Config and tokenizer: copied from a Hugging Face folder, written anew from what a GGUF file says."""
    generation = ckpt.generation_config
    if ckpt.gguf is None:
        for name in COPIED:
            source = ckpt.path / name
            if source.is_dir():
                shutil.copytree(source, folder / name)
            elif source.is_file():
                shutil.copyfile(source, folder / name)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["tie_word_embeddings"] = ckpt.config.tie_word_embeddings  # which the weights may have contradicted
    else:
        Tokenizer.from_checkpoint(ckpt).save(folder)
        generation = {"bos_token_id": ckpt.config.bos_token_id, "eos_token_id": list(ckpt.config.eos_token_ids)}
        config = hf_config(ckpt.config)
        write_json(folder / "generation_config.json", generation)
    write_json(folder / "config.json", config)
    again = from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")), generation, "config.json")
    lost = [key for key, value in vars(again).items() if value != getattr(ckpt.config, key)]
    lost = [key for key in lost if key != "architecture"]  # llama with a window is mistral
    if lost:
        raise ValueError(
            f"{ckpt.path}: config.json has no way to say its {', '.join(lost)}; load the file itself instead"
        )


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def hf_config(config: ModelConfig) -> dict:
    """The config.json that describes `config`."""
    c, windows = config, sorted(set(config.sliding_window) - {None})
    kind = "mistral" if windows and c.architecture == "llama" else c.architecture  # one model under two names
    config = {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "hidden_act": "silu",
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "rope_scaling": c.rope_scaling,
        "max_position_embeddings": c.max_position_embeddings,
        "tie_word_embeddings": c.tie_word_embeddings,
        "attention_bias": c.o_bias,
        "mlp_bias": c.mlp_bias,
        "sliding_window": windows[0] if windows else None,
        "bos_token_id": c.bos_token_id,
        "eos_token_id": list(c.eos_token_ids),
        "torch_dtype": c.dtype,
    }
    if kind == "gemma3":
        config |= {"model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh"}
        config |= {"query_pre_attn_scalar": round(c.attn_scale**-2), "rope_local_base_freq": c.rope_local_theta}
    if windows and kind != "mistral":
        kinds = ["full_attention" if w is None else "sliding_attention" for w in c.sliding_window]
        config |= {"use_sliding_window": True, "layer_types": kinds}
    return config


@as_command
def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="quantize.py", description="Write a model with fewer bits a weight to a folder."
    )
    parser.add_argument(
        "--model", default="smollm2", help="short name, folder, .gguf file or hub id (default: smollm2)"
    )
    parser.add_argument("--quant", default="int4", help="int8, int8-g32, int4, int4-g64, int4-g128 (default: int4)")
    parser.add_argument("--out", required=True, help="the folder to create")
    parser.add_argument("--force", action="store_true", help="replace --out if this command wrote it before")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    out = save_quantized(args.model, args.quant, args.out, args.force, draw_bar)
    size = (out / WEIGHTS).stat().st_size
    print(f"{out}: {size / 1e6:.1f} MB of weights as {args.quant}, in {time.perf_counter() - start:.1f} s")
    return 0


def draw_bar(done: int, total: int) -> None:
    """One line on a terminal's stderr, drawn over itself."""
    if sys.stderr.isatty():
        bar = "#" * (30 * done // total)
        end = "\n" if done == total else ""
        warn(f"\rquantising [{bar:<30}] {done / 1e6:.0f}/{total / 1e6:.0f} MB", end=end)


if __name__ == "__main__":
    sys.exit(main())
