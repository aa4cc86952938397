"""The C++ kernels, built at first use by the machine's own compiler and loaded without torch's headers.

The problem. Fast kernels need the machine's own instructions, so they cannot be shipped once for all; and an extension
that includes torch's headers takes half a minute to build.

The idea. The kernels only need pointers and sizes, so kernels.cpp is plain C++ and builds in seconds. The library is
kept in the user's cache under a name that hashes everything the result depends on:

    kernels-<hash of sources, flags, compiler version, processor>.so

A change of any of them builds anew, nothing else ever does. The file is renamed into place when it is complete, so two
processes that build at once both find a whole library.

Left out: Windows, and compilers that do not understand g++'s options.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

SOURCES = (
    "kernels.cpp", "attention.h", "linear.h", "pool.h", "sampling.h", "simd.h",
)  # fmt: skip
FLAGS = ("-O3", "-std=c++17", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")


class BuildError(ValueError):
    """The C++ kernels cannot be built or loaded on this machine."""


def cache_dir() -> Path:
    """Where builds are kept: $VITRINE_CACHE, or vitrine/ under the user's cache folder."""
    if own := os.environ.get("VITRINE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitrine"


def build(extra_flags: tuple[str, ...] = ()) -> Path:
    """The shared library for this machine, built if the cache has none; raises BuildError without a compiler."""
    wanted = os.environ.get("CXX", "").strip()  # as make takes it: a compiler, perhaps with flags, or behind a cache
    commands = [shlex.split(wanted)] if wanted else [["g++"], ["c++"], ["clang++"]]
    compiler = next(([path, *flags] for name, *flags in commands if (path := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({wanted or 'g++, c++, clang++'}) on the path: install one, or set CXX")
    sources = [Path(__file__).with_name(name) for name in SOURCES]
    flags = (*FLAGS, *extra_flags)
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    key = hashlib.sha256("\0".join([version, *compiler[1:], *flags, _processor()]).encode())
    for source in sources:
        key.update(source.read_bytes())
    library = cache_dir() / f"kernels-{key.hexdigest()[:24]}.so"
    command = [*compiler, *flags, str(sources[0])]
    try:
        if library.exists():
            return library
        library.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=library.parent)
    except OSError as error:  # a read-only home must not cost a factor of forty
        print(f"kernels: {error}: built for this run only; set VITRINE_CACHE to a folder to keep them", file=sys.stderr)
        folder = tempfile.TemporaryDirectory()
        atexit.register(folder.cleanup)
        return _compile(command, Path(folder.name) / "kernels.so")
    with folder:
        built = _compile(command, Path(folder.name) / "kernels.so")
        os.replace(built, library)  # when it is complete: never half a library
    return library


def _compile(command: list[str], target: Path) -> Path:
    result = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{result.stderr[-2000:]}")
    return target


def _processor() -> str:  # what -march=native looks at
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("flags", "Features", "model name")
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


class Library:
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


library: Library | None = None
threads = torch.get_num_threads()


def load(path: Path | None = None) -> str:
    """Load a build (this machine's own by default) and return its instruction set."""
    global library
    if library is None or path is not None:
        try:
            library = Library(path or build())
        except OSError as error:
            raise BuildError(f"the built kernels cannot be loaded: {error}") from error
        library.set_threads(threads)
    return library.isa


def set_threads(n: int) -> None:
    """Threads of the kernels, the caller's included."""
    global threads
    threads = n
    if library is not None:
        library.set_threads(n)
