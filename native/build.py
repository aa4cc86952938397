"""The C++ kernels, built at first use by the machine's own compiler and loaded without torch's headers.

The problem. Fast kernels need the machine's own instructions, so they cannot be shipped once for all; and an extension
that includes torch's headers takes half a minute to build.

The idea. The kernels only need pointers and sizes, so kernels.cpp is plain C++ and builds in seconds. The library is
kept in the user's cache under a name that hashes everything the result depends on:

    kernels-<hash of sources, flags, compiler version, processor>.so

It is renamed into place when it is complete, so two processes that build at once both load a complete library.

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

SOURCES = [Path(__file__).with_name(f) for f in "kernels.cpp attention.h linear.h pool.h sampling.h simd.h".split()]
FLAGS = ("-O3", "-std=c++17", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")


class BuildError(ValueError):
    """The C++ kernels cannot be built or loaded on this machine."""


def cache_dir() -> Path:
    """Where builds are kept: $VITRINE_CACHE, or vitrine/ under the user's cache folder."""
    if own := os.environ.get("VITRINE_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitrine"


def build(arguments: str, extra_flags: tuple[str, ...] = ()) -> Path:
    """The shared library for this machine, built if the cache has none; raises BuildError without a compiler.

    `arguments` is the header with the structs of the operations (native/operation.py).
    """
    cxx = os.environ.get("CXX", "").strip()  # as make takes it: a compiler, perhaps with flags, or behind a cache
    commands = [shlex.split(cxx)] if cxx else [["g++"], ["c++"], ["clang++"]]
    compiler = next(([path, *flags] for name, *flags in commands if (path := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({cxx or 'g++, c++, clang++'}) on the path: install one, or set CXX")
    flags = (*compiler[1:], *FLAGS, *extra_flags)
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    parts = [version, *flags, _processor(), arguments, *(source.read_text("utf-8") for source in SOURCES)]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    library = cache_dir() / f"kernels-{key[:24]}.so"
    try:
        if library.exists():
            return library
        library.parent.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(dir=library.parent)
    except OSError as error:  # a read-only home must not cost a factor of forty
        print(f"kernels: {error}: built for this run only; set VITRINE_CACHE to a folder to keep them", file=sys.stderr)
        folder = tempfile.TemporaryDirectory()
        atexit.register(folder.cleanup)
        return _compile([compiler[0], *flags], arguments, Path(folder.name))
    with folder:
        os.replace(_compile([compiler[0], *flags], arguments, Path(folder.name)), library)
    return library


def _compile(command: list[str], arguments: str, folder: Path) -> Path:
    (folder / "arguments.h").write_text(arguments)
    command += ["-I", str(folder), str(SOURCES[0]), "-o", str(folder / "kernels.so")]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{result.stderr[-2000:]}")
    return folder / "kernels.so"


def _processor() -> str:  # what -march=native looks at
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


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


def load(path: Path) -> None:
    """Have the operations run in the library at `path` from now on."""
    global library
    try:
        library = Library(path)
    except OSError as error:
        raise BuildError(f"the built kernels cannot be loaded: {error}") from error
    library.set_threads(threads)


def set_threads(n: int) -> None:
    """Threads of the kernels, the caller's included."""
    global threads
    threads = n
    if library is not None:
        library.set_threads(n)
