"""The C++ kernels: built at first use, loaded with ctypes, called with one packed run of words.

The problem. An extension that includes torch's headers takes half a minute to build, and a wheel must be built for
every machine. But the kernels only need pointers and sizes.

The idea. kernels.cpp is plain C++ without torch, built once by the machine's own compiler for the machine's own
instruction set, and kept in the user's cache under a name that hashes everything the result depends on (sources,
flags, compiler, processor), so a change of any of them builds anew and two processes can share one file. Its single
entry point takes a TAPE:

    one operation      | op | n | pointers and sizes ... |                              1 call
    a recorded step    | op | n | ... || op | n | ... || ... || op | n | ... |          still 1 call

`record()` keeps the words of every operation called inside it, together with the tensors they point to. `replay()`
then runs the whole step again without Python in between: the pointers are fixed, the numbers behind them (token ids,
positions, block tables, lengths) are written in place before each replay. It is a CUDA graph for the CPU, with the same
rule: whatever is not one of our operations would silently not be replayed, so the recorder refuses it.

This file is the second third of kernels.py and holds functions of the same names and signatures as the references
there. Left out: Windows, and compilers other than those that understand g++'s options.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

SOURCES = ("kernels.cpp", "kernels_attention.h", "kernels_linear.h", "kernels_pool.h", "kernels_simd.h")
FLAGS = ("-O3", "-std=c++17", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")
RMS_NORM, SILU_MUL, LINEAR, EMBEDDING, ROPE, ATTENTION = range(6)  # as in OPS of kernels.cpp
CACHE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class BuildError(ValueError):
    """The C++ kernels cannot be built or loaded on this machine."""


# ---------------------------------------------------------------- building and loading


def cache_dir() -> Path:
    """Where builds are kept: $VITRINE_CACHE, or vitrine/ under the user's cache folder."""
    if own := os.environ.get("VITRINE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitrine"


def build(extra_flags: tuple[str, ...] = ()) -> Path:
    """The shared library for this machine, built if the cache has none; raises BuildError without a compiler."""
    wanted = os.environ.get("CXX")
    compiler = shutil.which(wanted) if wanted else shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")
    if compiler is None:
        raise BuildError(f"no C++ compiler ({wanted or 'g++, c++, clang++'}) on the path: install one, or set CXX")
    sources = [Path(__file__).with_name(name) for name in SOURCES]
    flags = (*FLAGS, *extra_flags)
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout
    key = hashlib.sha256("\0".join([version, *flags, _processor()]).encode())
    for source in sources:
        key.update(source.read_bytes())
    library = cache_dir() / f"kernels-{key.hexdigest()[:24]}.so"
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:  # renamed when complete: never half a library
        result = subprocess.run(
            [compiler, *flags, str(sources[0]), "-o", f"{folder}/kernels.so"], capture_output=True, text=True
        )
        if result.returncode:
            raise BuildError(f"{compiler} failed on kernels.cpp:\n{result.stderr[-2000:]}")
        os.replace(f"{folder}/kernels.so", library)
    return library


def _processor() -> str:  # what -march=native looks at
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


class _Library:
    """The loaded functions. `run` keeps Python's lock (a single operation is too short to hand it over and wait for
    it to come back); `replay` releases it, so that the next step can be planned meanwhile."""

    def __init__(self, path: Path):
        held, released = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
        self.run, self.replay = held.vitrine_run, released.vitrine_run
        for run in (self.run, self.replay):
            run.argtypes, run.restype = (ctypes.c_char_p, ctypes.c_int64), ctypes.c_char_p
        self.set_threads = released.vitrine_set_threads
        self.set_threads.argtypes = (ctypes.c_int64,)
        held.vitrine_isa.restype = ctypes.c_char_p
        self.isa = held.vitrine_isa().decode()


_library: _Library | None = None
_threads = torch.get_num_threads()


def load(path: Path | None = None) -> str:
    """Load a build (this machine's own by default) and return its instruction set."""
    global _library
    if _library is None or path is not None:
        try:
            _library = _Library(path or build())
        except OSError as error:
            raise BuildError(f"the built kernels cannot be loaded: {error}") from error
        _library.set_threads(_threads)
    return _library.isa


def set_threads(n: int) -> None:
    """Threads of the kernels, the caller's included."""
    global _threads
    _threads = n
    if _library is not None:
        _library.set_threads(n)


# ---------------------------------------------------------------- tapes


class Tape(TorchDispatchMode):
    """The operations called while it was open, to be run again by `replay()`; see `kernels.record`."""

    # What moves no data; everything else outside torch.ops.vitrine would be missing from the replay.
    HARMLESS = {
        "view",
        "reshape",
        "_unsafe_view",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "unsqueeze",
        "squeeze",
    }
    HARMLESS |= {"alias", "detach", "flatten", "unflatten", "empty", "empty_like", "new_empty", "chunk", "unbind"}

    def __init__(self):
        super().__init__()
        self.words: list[bytes] = []
        self.kept: list = []  # the tensors behind the pointers

    def __enter__(self):
        global _recording
        if _recording is not None:
            raise ValueError("a tape is already being recorded: close it first")
        _recording = self
        return super().__enter__()

    def __exit__(self, *error):
        global _recording
        _recording = None
        self._all = b"".join(self.words)
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "vitrine" and func._schema.name.split("::")[1] not in self.HARMLESS:
            raise ValueError(f"{func} cannot be part of a tape: only torch.ops.vitrine and views can be replayed")
        out = func(*args, **(kwargs or {}))
        self.kept.append((args, kwargs, out))
        return out

    def replay(self) -> None:
        """Run every recorded operation again, on the same memory."""
        _check(_library.replay(self._all, len(self._all) // 8))


_recording: Tape | None = None


def _call(op: int, form: str, *words) -> None:
    tape = _layout(form).pack(op, len(words), *words)
    if _recording is not None:
        _recording.words.append(tape)
    _check(_library.run(tape, len(words) + 2))


@lru_cache(maxsize=64)
def _layout(form: str) -> struct.Struct:  # "14q1d": whole numbers and pointers first, then floats
    return struct.Struct("=2q" + form)


def _check(error: bytes | None) -> None:
    if error:
        raise ValueError(error.decode())


def _ready(t: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    if t.dtype is dtype and t.is_contiguous():
        return t
    if _recording is not None:
        raise ValueError(f"a tape needs contiguous {dtype} tensors, got {t.dtype} with strides {t.stride()}")
    return t.to(dtype).contiguous()


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


# ---------------------------------------------------------------- the operations


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide, weight = _ready(x), _ready(weight)
    out = torch.empty_like(wide)
    n = weight.shape[0]
    rows = wide.numel() // n
    _call(RMS_NORM, "7qd", wide.data_ptr(), 0, weight.data_ptr(), out.data_ptr(), 0, rows, n, eps)
    return out.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    wide, added, weight = _ready(x), _ready(residual), _ready(weight)
    out, total = torch.empty_like(wide), torch.empty_like(wide)
    n = weight.shape[0]
    pointers = (wide.data_ptr(), added.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr())
    _call(RMS_NORM, "7qd", *pointers, wide.numel() // n, n, eps)
    return out.to(x.dtype), total.to(x.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    wide = _ready(gate_up)
    n = wide.shape[-1] // 2
    out = wide.new_empty((*wide.shape[:-1], n))
    _call(SILU_MUL, "4q", wide.data_ptr(), out.data_ptr(), out.numel() // max(n, 1), n)
    return out.to(gate_up.dtype)


def rope_write_kv(
    qkv, positions, cos_sin, k_cache, v_cache, slot_mapping, num_heads, q_norm=None, k_norm=None, eps=0.0
) -> Tensor:
    num_blocks, kv_heads, block_size, head_dim = k_cache.shape
    wide, positions, slots = _ready(qkv), _ready(positions, torch.int64), _ready(slot_mapping, torch.int64)
    cos_sin = _ready(cos_sin)
    q_norm, k_norm = (None if w is None else _ready(w) for w in (q_norm, k_norm))
    rows, width = wide.shape
    if width != (num_heads + 2 * kv_heads) * head_dim or cos_sin.shape[1] != head_dim:
        raise ValueError(
            f"qkv has {width} columns and the rotary table {cos_sin.shape[1]}, but {num_heads} + 2 * {kv_heads} "
            f"heads of {head_dim} need {(num_heads + 2 * kv_heads) * head_dim} and {head_dim}"
        )
    q = wide.new_empty((rows, num_heads, head_dim))
    _call(
        ROPE,
        "17qd",
        _cache_type(k_cache, v_cache),
        *(_pointer(t) for t in (wide, positions, cos_sin, k_cache, v_cache, slots, q_norm, k_norm, q)),
        *(rows, num_heads, kv_heads, num_blocks, block_size, head_dim, cos_sin.shape[0], eps),
    )
    return q.to(qkv.dtype)


def paged_attention(q, k_cache, v_cache, block_tables, query_start, context_lens, scale, window=0) -> Tensor:
    num_blocks, kv_heads, block_size, head_dim = k_cache.shape
    wide = _ready(q)
    tables, starts, lens = (_ready(t, torch.int32) for t in (block_tables, query_start, context_lens))
    rows, heads, dim = wide.shape
    if dim != head_dim or heads % kv_heads:
        raise ValueError(f"q has {heads} heads of {dim}, the cache {kv_heads} heads of {head_dim}: they do not fit")
    out = torch.empty_like(wide)
    _call(
        ATTENTION,
        "17qd",
        _cache_type(k_cache, v_cache),
        *(t.data_ptr() for t in (wide, k_cache, v_cache, tables, starts, lens, out)),
        *(rows, lens.shape[0], tables.shape[1], heads, kv_heads, num_blocks, block_size, head_dim, window, scale),
    )
    return out.to(q.dtype)


def _cache_type(k_cache: Tensor, v_cache: Tensor) -> int:
    if k_cache.dtype not in CACHE_TYPES or k_cache.dtype is not v_cache.dtype:
        raise ValueError(f"caches of {k_cache.dtype} and {v_cache.dtype}: both must be float32, bfloat16 or float16")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("the caches must be contiguous [num_blocks, kv_heads, block_size, head_dim] tensors")
    return CACHE_TYPES[k_cache.dtype]


@lru_cache(maxsize=256)
def packed_bytes(bits: int, in_features: int, group_size: int) -> int:
    """Bytes of one tile of 16 channels in the packed forms of kernels.py."""
    step = group_size or 32
    k = -(-in_features // step) * step
    if bits == 4:
        return k * 8 + k // group_size * 64
    return k * 16 + (k // group_size * 32 if group_size else 64)


def _linear(
    bits, x, packed, out_features, group_size, bias, norm_weight, eps, residual, silu_gate, activation
) -> Tensor:
    k, width = x.shape[-1], out_features // 2 if silu_gate else out_features
    if packed.shape != (-(-out_features // 16), packed_bytes(bits, k, group_size)):
        raise ValueError(
            f"int{bits} weight {tuple(packed.shape)} is not that of [{out_features}, {k}] in groups of {group_size}"
        )
    if activation not in ("int8", "float"):
        raise ValueError(f"activation {activation!r} is unknown: choose int8 or float")
    shape = (*x.shape[:-1], width)
    for name, given, wanted in (
        ("bias", bias, (out_features,)),
        ("norm_weight", norm_weight, (k,)),
        ("residual", residual, shape),
    ):
        if given is not None and given.shape != wanted:
            raise ValueError(f"{name} has shape {tuple(given.shape)}, this product needs {wanted}")
    wide = _ready(x)
    bias, norm_weight, residual = (None if t is None else _ready(t) for t in (bias, norm_weight, residual))
    out = wide.new_empty(shape)
    _call(
        LINEAR,
        "13qd",
        bits,
        *(_pointer(t) for t in (wide, packed, bias, norm_weight, residual, out)),
        *(out.numel() // max(width, 1), k, out_features, group_size, silu_gate, activation == "float", eps),
    )
    return out.to(x.dtype)


def int4_linear(
    x,
    packed,
    out_features,
    group_size,
    bias=None,
    norm_weight=None,
    eps=0.0,
    residual=None,
    silu_gate=False,
    activation="int8",
) -> Tensor:
    return _linear(4, x, packed, out_features, group_size, bias, norm_weight, eps, residual, silu_gate, activation)


def int8_linear(
    x,
    packed,
    out_features,
    group_size,
    bias=None,
    norm_weight=None,
    eps=0.0,
    residual=None,
    silu_gate=False,
    activation="int8",
) -> Tensor:
    return _linear(8, x, packed, out_features, group_size, bias, norm_weight, eps, residual, silu_gate, activation)


def _embedding(bits: int, ids: Tensor, packed: Tensor, in_features: int, group_size: int) -> Tensor:
    tiles, tile_bytes = packed.shape
    if tile_bytes != packed_bytes(bits, in_features, group_size):
        raise ValueError(
            f"packed int{bits} table {tuple(packed.shape)} has no rows of {in_features} in groups of {group_size}"
        )
    ids = _ready(ids, torch.int64)
    out = torch.empty((*ids.shape, in_features))
    sizes = (ids.numel(), in_features, group_size, tile_bytes, tiles)
    _call(EMBEDDING, "9q", bits, ids.data_ptr(), packed.data_ptr(), out.data_ptr(), *sizes)
    return out


def int4_embedding(ids: Tensor, packed: Tensor, in_features: int, group_size: int) -> Tensor:
    return _embedding(4, ids, packed, in_features, group_size)


def int8_embedding(ids: Tensor, packed: Tensor, in_features: int, group_size: int) -> Tensor:
    return _embedding(8, ids, packed, in_features, group_size)
