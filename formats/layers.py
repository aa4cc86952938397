"""From the tensors of a checkpoint to linear layers and tables, dense or under a scheme of quantize.py.

The problem. A layer may be fused of several tensors, each a float tensor, GGUF blocks or the stored parts of a
quantised folder, and no more than one of them should be in memory beside the layer that is built.

    names ──► load_rows     blocks the scheme can hold: adopted      else quantised, a chunk at a time ──► concatenate
          └─► load_dense    converted a chunk at a time, the rows of one tensor under those of the other

Left out: which names form a layer (model.py).
"""

from __future__ import annotations

import torch

from quantize import (
    INT8,
    INT8_G32,
    TABLES,
    VERSION,
    Linear,
    QuantRows,
    Scheme,
    adopt_blocks,
    concatenate,
    float_chunks,
    parse_scheme,
    quantised_layer,
    quantize_rows,
)


def resolve_scheme(ckpt, scheme: str | Scheme | None) -> Scheme | None:
    """The scheme in force: the asked one, or that of a folder which is quantised already and cannot have another."""
    asked_for = parse_scheme(scheme)
    if ckpt.quant is None:
        return asked_for
    if ckpt.quant["version"] != VERSION:
        raise ValueError(f"{ckpt.path} was written as version {ckpt.quant['version']} of this format, not {VERSION}")
    stored = parse_scheme(ckpt.quant["scheme"])
    if asked_for not in (None, stored):
        raise ValueError(
            f"{ckpt.path} is quantised as {stored.name} and cannot be loaded as {asked_for.name}; leave quant out, "
            f"or quantise the original model"
        )
    return stored


def scheme_for(ckpt, names: list[str], scheme: Scheme) -> Scheme:
    """The scheme for the weights `names`, which form one layer and therefore share one form.

    The embedding table and the head keep 8 bits. Next to a Q8_0 tensor, which has groups, "int8" has groups too: a
    scale for each row would only lose what the file still has.
    """
    if scheme.bits < 8 and names[0] in TABLES:
        scheme = INT8
    if scheme is INT8 and any(b is not None and b.kind == "Q8_0" for b in map(ckpt.blocks, names)):
        scheme = INT8_G32
    return scheme


def load_rows(ckpt, names: list[str], scheme: Scheme) -> list[QuantRows]:
    """The weights `names`, which form one layer, as one piece each: taken over where that loses nothing."""
    if ckpt.quant is not None:
        return [stored_rows(ckpt, name.removesuffix(".weight"), scheme) for name in names]
    form, pieces = scheme_for(ckpt, names, scheme), []
    for name in names:
        blocks = ckpt.blocks(name)
        rows = None if blocks is None else adopt_blocks(blocks, form)
        if rows is None:
            rows = quantize_rows(ckpt.tensor(name) if blocks is None else blocks, form, name)
        pieces.append(rows)
        ckpt.release(name)  # the source is mapped, and its pages would stay beside the copy
    return pieces


def stored_rows(ckpt, layer: str, scheme: Scheme) -> QuantRows:
    """Rows of a folder that formats/quantized_folder.py wrote. Raises ValueError naming a part that is not there."""
    n, k = ckpt.shape(f"{layer}.weight")
    stored = {name.rpartition(".")[2]: name for name in ckpt.names() if name.rpartition(".")[0] == layer}
    parts = {part: ckpt.tensor(name) for part, name in stored.items() if part != "bias"}
    held = {part: (t.dtype, tuple(t.shape)) for part, t in parts.items()}
    forms = {form: form.layout(n, k) for form in (scheme, INT8, INT8_G32)}  # what `scheme_for` may have chosen
    form = min(forms, key=lambda form: len(forms[form].items() ^ held.items()))
    if held == forms[form]:
        return QuantRows(form, {part: parts[part] for part in forms[form]}, k)
    lost = ", ".join(f"{layer}.{part}" for part in forms[form] if part not in held)
    fault = f"{lost} is missing" if lost else f"the parts of {layer} are not those of a [{n}, {k}] weight"
    raise ValueError(f"{ckpt.path}: {fault}: the folder is damaged; quantise the original model again")


def load_dense(ckpt, names: list[str], dtype: torch.dtype) -> torch.Tensor:
    """The weights `names` under one another as one [N, K] of `dtype`; a part is converted a chunk at a time."""
    sources = [ckpt.blocks(name) for name in names]
    if len(names) == 1 and sources[0] is None:
        return ckpt.tensor(names[0]).to(dtype)
    rows = [ckpt.shape(name)[0] for name in names]
    out = torch.empty(sum(rows), ckpt.shape(names[0])[1], dtype=dtype)
    for name, source, part in zip(names, sources, out.split(rows), strict=True):
        for start, w in float_chunks(ckpt.tensor(name) if source is None else source):
            part[start : start + len(w)] = w
        ckpt.release(name)
    return out


def linear_from_checkpoint(
    ckpt, names: list[str], scheme: str | Scheme | None, dtype: torch.dtype, bias_names: list[str] | None = None
) -> Linear:
    """The layer whose rows are those of the weights `names`, one under the other (a fused layer has several).

    `scheme` None means dense in `dtype`, unless the checkpoint is a quantised folder. One weight is in memory at a
    time beside the layer. Raises ValueError as `resolve_scheme` and `quantize_rows` do.
    """
    bias = None if bias_names is None else torch.cat([ckpt.tensor(name).to(dtype) for name in bias_names])
    scheme = resolve_scheme(ckpt, scheme)
    if scheme is None:
        return Linear(load_dense(ckpt, names, dtype), bias)
    return quantised_layer(concatenate(load_rows(ckpt, names, scheme)), bias)
