"""A quantised model as a folder: what `python quantize.py --model M --quant int4 --out DIR` writes.

The problem. Quantising takes time and needs the big file; both should be paid once. And a folder must say for itself
how its weights are stored: a scheme that lives in a file name is lost with the first rename.

The idea. An ordinary Hugging Face folder, whose one safetensors file holds, for each quantised weight, its parts under
the name of the layer (self_attn.q_proj.qweight, .scales, .mins), and the scheme as metadata in the file's own header.
The folder takes its name at the very end: a full disk leaves nothing that looks complete.

Source: the safetensors format. Left out: shards, the layouts that other engines use for quantised weights, and
quantising with less memory than the quantised model needs.
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
from itertools import groupby
from math import prod
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file

from checkpoint import Checkpoint, CheckpointError, ModelConfig, open_checkpoint
from formats.command_line import as_command, warn
from formats.folder_files import QUANT_KEY, read_header, read_json
from formats.layers import load_rows
from formats.read_config import from_hf, is_quantised
from quantize import SCHEMES, VERSION, Scheme, parse_scheme
from tokenizer import Tokenizer

WEIGHTS = "model.safetensors"
COPIED = (  # beside the weights: everything that is needed to use the model
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates"),
)
Progress = Callable[[int, int], None]  # (weights quantised, weights in all)


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
    if out.is_file():
        raise ValueError(f"{out} is a file; --out names a folder to create")
    files = {p.name for p in out.iterdir()} if out.exists() else set()
    if files and not (files <= {WEIGHTS, *COPIED} and is_ours(out / WEIGHTS)):
        raise ValueError(f"{out} holds other files than this command writes and is left alone; choose another --out")
    if files and not force:
        raise ValueError(f"{out} exists; choose another --out, or add --force to replace it")


def is_ours(weights: Path) -> bool:
    try:
        return read_header(weights)[1] is not None
    except CheckpointError:
        return False


def layer_of(name: str) -> str:
    """The layer that a weight becomes part of: q, k and v are one, gate and up are one (model.py)."""
    return re.sub(r"(?:gate|up)_proj", "gate_up", re.sub(r"[qkv]_proj", "qkv", name))


def write_weights(ckpt: Checkpoint, scheme: Scheme, path: Path, progress: Progress) -> None:
    """The safetensors file: norms and biases as they are, and each matrix as the parts that a model would hold."""
    matrices = {name: ckpt.shape(name) for name in ckpt.names() if is_quantised(name, ckpt.shape(name))}
    parts = {name: ckpt.tensor(name) for name in ckpt.names() if name not in matrices}
    total, done = sum(map(prod, matrices.values())), 0
    for _, names in groupby(matrices, layer_of):  # the weights of a layer follow one another
        names = list(names)
        for name, rows in zip(names, load_rows(ckpt, names, scheme), strict=True):
            parts |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in rows.parts.items()}
            done += prod(matrices[name])
        progress(done, total)
    shapes = {name.removesuffix(".weight"): shape for name, shape in matrices.items()}
    about = {"bits": scheme.bits, "group_size": scheme.group_size, "scheme": scheme.name}
    try:
        save_file(parts, path, {QUANT_KEY: json.dumps({"version": VERSION, **about, "shapes": shapes})})
    except SafetensorError as error:  # a full disk
        raise OSError(f"{path} cannot be written: {error}") from error
    with open(path, "rb+") as file:
        os.fsync(file.fileno())  # some file systems report a full disk only here


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
        config = read_json(folder / "config.json")
        config["tie_word_embeddings"] = ckpt.config.tie_word_embeddings  # which the weights may have contradicted
    else:
        Tokenizer.from_checkpoint(ckpt).save(folder)
        generation = {"bos_token_id": ckpt.config.bos_token_id, "eos_token_id": list(ckpt.config.eos_token_ids)}
        config = hf_config(ckpt.config)
        write_json(folder / "generation_config.json", generation)
    write_json(folder / "config.json", config)
    again = vars(from_hf(read_json(folder / "config.json"), generation, "config.json"))
    again.pop("architecture")  # llama with a window is mistral
    lost = [key for key, value in again.items() if value != getattr(ckpt.config, key)]
    if lost:
        raise ValueError(
            f"{ckpt.path}: config.json has no way to say its {', '.join(lost)}; load the file itself instead"
        )


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def hf_config(config: ModelConfig) -> dict:
    """The config.json that describes `config`."""
    c, windows = config, sorted(set(config.sliding_window) - {None})
    if c.architecture not in ("llama", "mistral", "qwen2", "qwen3", "gemma3"):
        raise ValueError(
            f"no config.json can be written from a GGUF file of a {c.architecture}; load the file itself, or use the "
            f"original folder"
        )
    kind = "mistral" if windows and c.architecture == "llama" else c.architecture  # one model under two names
    same = (
        "vocab_size hidden_size intermediate_size head_dim rms_norm_eps rope_theta rope_scaling mlp_bias bos_token_id"
    )
    values = {key: getattr(c, key) for key in [*same.split(), "max_position_embeddings", "tie_word_embeddings"]}
    values |= {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        "hidden_act": "silu",
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "attention_bias": c.o_bias,
        "sliding_window": windows[0] if windows else None,
        "eos_token_id": list(c.eos_token_ids),
        "torch_dtype": c.dtype,
    }
    if kind == "gemma3":
        values |= {"model_type": "gemma3_text", "hidden_act": "gelu_pytorch_tanh"}
        values |= {"query_pre_attn_scalar": round(c.attn_scale**-2), "rope_local_base_freq": c.rope_local_theta}
    if windows and kind != "mistral":
        kinds = ["full_attention" if w is None else "sliding_attention" for w in c.sliding_window]
        values |= {"use_sliding_window": True, "layer_types": kinds}
    return values


@as_command
def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="quantize.py", description="Write a model with fewer bits a weight to a folder."
    )
    parser.add_argument(
        "--model", default="smollm2", help="short name, folder, .gguf file or hub id (default: smollm2)"
    )
    parser.add_argument("--quant", default="int4", help=f"{', '.join(SCHEMES)} (default: int4)")
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
        warn(f"\rquantising [{bar:<30}] {done / 1e6:.0f}/{total / 1e6:.0f} million weights", end=end)


if __name__ == "__main__":
    sys.exit(main())
