"""From a name or a path to a config, weights and tokenizer files.

The problem: weights come in two containers (a transformers folder of safetensors, a GGUF file), in one piece or in
shards, under two naming schemes, with q and k of some files in another row order, with or without a head, and now and
then cut short. A loader that is generous about any of it does not fail, it babbles: a missing shard becomes noise, a
stray file overwrites the right one. So a checkpoint is checked against the list of tensors that its own config demands,
all of it, before anything is loaded; and memory never holds the model twice, because one tensor is read at a time.

    open_checkpoint("smollm2")            --> download.fetch ----+
    open_checkpoint("owner/repository")   --> download.hub_folder |
    open_checkpoint("model.gguf")  -------------------------------+--> Checkpoint: config, names(), shape(),
    open_checkpoint("folder/")     -------------------------------+                tensor(), blocks()
                                                                         |  one tensor at a time
                                                                         v
                                                                      model.py

Nothing is ever unpickled: .bin and .pt files may run code when opened. Left out: those, GGUF files in several parts,
and checkpoints of GPTQ, AWQ and bitsandbytes.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from formats import gguf
from formats.config import CheckpointError, ModelConfig
from formats.download import REGISTRY, fetch, hub_folder
from formats.families import ARCHITECTURES, Architecture
from formats.folder_files import PICKLE_REFUSAL, PICKLES, no_config, no_weights, read_header, read_json, some_of
from formats.read_config import from_gguf, from_hf, gguf_name, llama_name, tensor_shapes

__all__ = ["Checkpoint", "CheckpointError", "ModelConfig", "fetch", "open_checkpoint", "tensor_shapes"]

# Computed from the config, or read from GGUF into it, and never loaded:
LEFTOVER = re.compile(
    r"(^|\.)rotary_emb\.inv_freq$|attn_rot_embd\.weight$|^rope_freqs\.weight$|\.attn\.(masked_)?bias$"
)
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "U8": "uint8", "I8": "int8"}


def open_checkpoint(model: str | Path) -> Checkpoint:
    """Open a short name ("smollm2"), a transformers folder, a .gguf file, or a hub id ("owner/name").

    A short name wins over a file of that name; write "./smollm2" for the latter. Everything is checked here, nothing
    but headers is read. Raises CheckpointError with the cause, the value and the remedy.
    """
    path = Path(model).expanduser()
    if str(model) in REGISTRY:
        return GGUFCheckpoint(fetch(str(model)))
    if path.is_dir():
        return FolderCheckpoint(path)
    if path.is_file():
        if path.suffix in PICKLES:
            raise CheckpointError(PICKLE_REFUSAL.format(path))
        if path.suffix == ".safetensors":
            raise CheckpointError(
                f"{path} is a part of a checkpoint: name the folder {path.parent} with its config.json."
            )
        return GGUFCheckpoint(path)
    if isinstance(model, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", model) and path.suffix != ".gguf":
        return FolderCheckpoint(hub_folder(model))
    raise CheckpointError(
        f"No model {str(model)!r}: no such file or folder, and not a hub id (owner/name). "
        f"Short names: {', '.join(REGISTRY)}."
    )


class Checkpoint:
    """A checked, opened checkpoint. Tensors go by the names of a transformers Llama, in its order of rows, in any file.

    config, path (folder or file), generation_config (of a folder, else {}), gguf (the gguf.File, or None), quant (the
    scheme if quantize.py wrote the folder, or None). Tensors may be views of mapped files: read them, do not write.
    """

    config: ModelConfig
    gguf: gguf.File | None = None
    quant: dict | None = None

    def __init__(self, path: Path):
        self.path, self.generation_config = path, {}

    def names(self) -> list[str]:
        """The names of all tensors to load: exactly those that the config demands."""
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        """As stored; of a matrix that a quantised folder holds in parts, its own."""
        return self._shapes[name]

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, dense, in the dtype of the file (quantised GGUF blocks: float32)."""
        raise NotImplementedError

    def blocks(self, name: str) -> gguf.Blocks | None:
        """The tensor as the quantised blocks that a GGUF file holds, or None when it is stored dense."""
        return None

    def release(self, name: str) -> None:
        """Let the pages of a mapped tensor leave memory: for loaders that have just copied it."""

    @property
    def _family(self) -> Architecture:
        return ARCHITECTURES[self.config.architecture]

    def _stored(self, name: str) -> str:
        """The name that the file itself has for a tensor."""
        return name

    def _check(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Set names and shapes; refuse tensors that are missing, unknown, or of another shape than the config's."""
        expected, names = tensor_shapes(self.config), []
        left = {name: shape for name, shape in shapes.items() if not LEFTOVER.search(name)}
        parts: dict[str, list[str]] = {}  # what quantize.py replaced a matrix by; their shapes are the scheme's
        for name in left:
            if self.quant is not None and name not in expected:
                parts.setdefault(name.rpartition(".")[0] + ".weight", []).append(name)
        for name in expected:
            names += [name] if name in left else parts.get(name, [name])
        missing = [self._stored(name) for name in names if name not in left]
        unknown = [name for name in left if name not in set(names)]
        if missing or unknown:
            raise CheckpointError(
                f"{self.path} does not hold the tensors that its config asks for."
                + (f" Missing ({len(missing)}): {some_of(missing)}." if missing else "")
                + (f" Unknown ({len(unknown)}): {some_of(unknown)}." if unknown else "")
                + " The weights and the config are not of the same model, or a part of them is not here."
            )
        for name, shape in expected.items():
            if left.get(name, shape) != shape:
                raise CheckpointError(
                    f"{self.path}: tensor {self._stored(name)!r} has shape {list(left[name])}, but the config asks for "
                    f"{list(shape)}: the weights and the config are not of the same model."
                )
        self._names, self._shapes = names, left | expected


class FolderCheckpoint(Checkpoint):
    """A transformers folder: config.json, safetensors (one file, or shards and an index), tokenizer files."""

    def __init__(self, path: Path):
        super().__init__(path)
        settings = read_json(path / "config.json", no_config(path))
        self.generation_config = read_json(path / "generation_config.json")
        self.config = from_hf(settings, self.generation_config, str(path / "config.json"))
        files, index = self._locate()
        self._files: dict[str, tuple[Path, str]] = {}  # where a tensor is, and under which name
        shapes, dtypes = {}, {}
        for file in files:
            header, quant = read_header(file)
            self.quant = quant or self.quant
            for stored, (shape, dtype) in header.items():
                if index is None or index.get(stored) == file.name:
                    name = llama_name(self.config, stored)
                    self._files[name], dtypes[name] = (file, stored), dtype
                    shapes[name] = shape[::-1] if self._transposed(name) else shape
        lost = [name for name in index or () if llama_name(self.config, name) not in shapes]
        if lost:
            raise CheckpointError(f"{path}: the index assigns tensors to files that lack them: {some_of(lost)}.")
        self._settle_head(shapes)
        self._settle_dtype(dtypes)
        self._check(shapes)

    def _locate(self) -> tuple[list[Path], dict[str, str] | None]:
        """The files to read, and which tensor counts in which of them (None: all of a single file).

        An index has the last word: files and duplicates of tensors that it does not name are never looked at.
        """
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            table = read_json(index).get("weight_map")
            if not isinstance(table, dict) or not all(isinstance(f, str) and f == Path(f).name for f in table.values()):
                raise CheckpointError(f"{index}: weight_map must assign a file of this folder to every tensor.")
            files = [self.path / file for file in sorted(set(table.values()))]
            for file in files:
                if not file.is_file():
                    raise CheckpointError(f"{file} is missing, but {index.name} names it: fetch it again.")
            return files, table
        single = self.path / "model.safetensors"
        files = [single] if single.is_file() else sorted(self.path.glob("*.safetensors"))
        if len(files) != 1:
            raise CheckpointError(no_weights(self.path, files))
        return files, None

    def _transposed(self, name: str) -> bool:
        return name.endswith("_proj.weight") and self.quant is None and self._family.transposed

    def _settle_head(self, shapes: dict) -> None:
        """Tied by the config and yet a head in the files: equal values are one tensor, else the flag is wrong."""
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if not self.config.tie_word_embeddings or head not in shapes or embedding not in shapes:
            return
        if shapes[head] == shapes[embedding] and torch.equal(self.tensor(head), self.tensor(embedding)):
            del shapes[head]
        else:
            self.config = replace(self.config, tie_word_embeddings=False)

    def _settle_dtype(self, dtypes: dict[str, str]) -> None:
        """Without a dtype in config.json the embedding's counts; dtypes that no layer takes are refused."""
        for name, dtype in dtypes.items():
            if LEFTOVER.search(name):
                continue
            if dtype not in DTYPES or (dtype in ("U8", "I8") and self.quant is None):
                allowed = ", ".join(d for d in DTYPES if d not in ("U8", "I8"))
                raise CheckpointError(f"{self.path}: tensor {name!r} is stored as {dtype}. Supported: {allowed}.")
        stored = DTYPES.get(dtypes.get("model.embed_tokens.weight", "F32"), "float32")
        self.config = replace(self.config, dtype=self.config.dtype or stored)

    def tensor(self, name: str) -> torch.Tensor:
        # One handle per tensor: the library maps the file, and pages once touched stay resident as long as a handle or
        # a tensor of it lives. This way a loader that copies and drops holds one tensor of the file at a time.
        path, stored = self._files[name]
        try:
            with safe_open(path, framework="pt") as file:
                tensor = file.get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {stored!r} cannot be read: {error}.") from error
        return tensor.t() if self._transposed(name) else tensor


class GGUFCheckpoint(Checkpoint):
    """A GGUF file of a family that formats/families.py knows.

    llama.cpp rotates neighbouring pairs (x0 x1), transformers halves (x0 x_(d/2)), so files of the llama architecture
    hold q and k reordered: both dense rows and blocks return in transformers' order, since a row is whole blocks.
    """

    def __init__(self, path: Path):
        super().__init__(path)
        self.gguf = gguf.File(path)
        tensors = self.gguf.tensors
        self.config = from_gguf(self.gguf.metadata, {n: t.shape for n, t in tensors.items()}, str(path))
        dense = {t.kind for t in tensors.values() if len(t.shape) > 1} <= {"F32", "F16", "BF16"}
        dtype = DTYPES[tensors["token_embd.weight"].kind] if dense else "float32"
        self.config = replace(self.config, dtype=dtype, rope_scaling=self._rope_scaling())
        ours = {self._stored(name): name for name in tensor_shapes(self.config)}
        self._check({ours.get(name, name): t.shape for name, t in tensors.items()})

    def _stored(self, name: str) -> str:
        return gguf_name(self.config, name)

    def _rope_scaling(self) -> dict | None:
        """Llama 3.1's is in no key: converters write it as a tensor of divisors, one for each rotary frequency."""
        scaling = self.config.rope_scaling
        if "rope_freqs.weight" not in self.gguf.tensors:
            return scaling
        factors = self.gguf.tensor("rope_freqs.weight").float().flatten()
        if len(factors) != self.config.rotary_dim // 2 or not bool((factors.isfinite() & (factors > 0)).all()):
            raise CheckpointError(
                f"{self.path}: tensor 'rope_freqs.weight' must hold {self.config.rotary_dim // 2} positive numbers."
            )
        if bool((factors == 1).all()):
            return scaling
        if scaling is not None:
            kind = scaling["rope_type"]
            raise CheckpointError(f"{self.path}: both {kind} rope scaling and 'rope_freqs.weight': not supported.")
        return {"rope_type": "llama3_factors", "factors": tuple(factors.tolist())}

    def _row_order(self, name: str) -> torch.Tensor | None:
        """Which stored row comes where: of each head, first the even rows, then the odd ones. None: as stored."""
        heads = {"q_proj": self.config.num_heads, "k_proj": self.config.num_kv_heads}.get(name.split(".")[-2])
        if heads is None or not self._family.pairs_in_gguf:
            return None
        rows = torch.arange(self.shape(name)[0])
        return rows.view(heads, -1, 2).transpose(1, 2).flatten()  # [heads, d/2, 2] -> [heads, 2, d/2] -> [rows]

    def tensor(self, name: str) -> torch.Tensor:
        dense, order = self.gguf.tensor(self._stored(name)), self._row_order(name)
        if order is not None:
            dense = dense[order]
        if self.config.norm_offset and "norm" in name:
            dense = dense - self.config.norm_offset  # GGUF files hold the sum
        if order is not None or self.gguf.blocks(self._stored(name)) is not None:
            self.release(name)  # a copy was made: its source need not stay resident
        return dense

    def blocks(self, name: str) -> gguf.Blocks | None:
        blocks, order = self.gguf.blocks(self._stored(name)), self._row_order(name)
        return blocks if blocks is None or order is None else blocks.rows(order)

    def release(self, name: str) -> None:
        self.gguf.release(self._stored(name))
