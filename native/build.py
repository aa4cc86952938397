"""The C++ kernels, built at first use by the machine's own compiler and loaded without torch's headers.

The problem. Fast kernels need the machine's own instructions, so they cannot be shipped once for all; and an extension
that includes torch's headers takes half a minute to build.

The idea. The kernels only need pointers and sizes, so kernels.cpp is plain C++ and builds in seconds. The library is
kept in the user's cache, under a name that says all that matters about it:

    kernels-<hash of sources, flags, compiler version, processor>-<hash of the library>.so

A file that is cut short or is another one does not hash to its own name: it is built again, never loaded. And it is
renamed into place when it is complete, so two processes that build at once both load a complete library.

Left out: Windows, and compilers that do not understand g++'s options.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

from formats.command_line import warn
from formats.download import cache_dir

SOURCES = [Path(__file__).with_name(f) for f in "kernels.cpp attention.h linear.h pool.h sampling.h simd.h".split()]
FLAGS = ("-O3", "-std=c++17", "-march=native", "-ffp-contract=off", "-fPIC", "-shared", "-pthread")

library: SimpleNamespace | None = None  # the loaded functions
threads = torch.get_num_threads()


class BuildError(ValueError):
    """The C++ kernels cannot be built or loaded on this machine."""


def build(arguments: str, extra_flags: tuple[str, ...] = ()) -> Path:
    """The shared library for this machine, built if the cache has none; raises BuildError without a compiler.

    `arguments` is the header with the structs of the operations (native/tape.py).
    """
    cxx = os.environ.get("CXX", "").strip()  # as make takes it: a compiler, perhaps with flags, or behind a cache
    commands = [shlex.split(cxx)] if cxx else [["g++"], ["c++"], ["clang++"]]
    compiler = next(([path, *flags] for name, *flags in commands if (path := shutil.which(name))), None)
    if compiler is None:
        raise BuildError(f"no C++ compiler ({cxx or 'g++, c++, clang++'}) on the path: install one, or set CXX")
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout
    command = [*compiler, *FLAGS, *extra_flags]
    parts = [version, *command[1:], processor(), arguments, *(source.read_text("utf-8") for source in SOURCES)]
    stem = f"kernels-{digest(chr(0).join(parts).encode())}-"
    with contextlib.suppress(OSError):  # if the cache cannot be read, it is said below
        for kept in cache_dir().glob(f"{stem}*.so"):
            if kept.name == f"{stem}{digest(kept.read_bytes())}.so":
                return kept
            warn(f"kernels: {kept} is damaged: built again")
            kept.unlink()
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    made = compile_library(command, arguments, Path(folder.name))
    try:
        cache_dir().mkdir(parents=True, exist_ok=True)
        partial = Path(shutil.copy(made, cache_dir() / f"{stem}{os.getpid()}.partial"))
        return partial.rename(cache_dir() / f"{stem}{digest(made.read_bytes())}.so")
    except OSError as error:  # a read-only home, or none, must not cost a factor of forty
        warn(f"kernels: {error}: built for this run only; set VITRINE_CACHE to a folder to keep them")
        return made


def compile_library(command: list[str], arguments: str, folder: Path) -> Path:
    (folder / "arguments.h").write_text(arguments)
    command = [*command, "-I", str(folder), str(SOURCES[0]), "-o", str(folder / "kernels.so")]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"{shlex.join(command)} failed:\n{result.stderr[-2000:]}")
    return folder / "kernels.so"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]


def processor() -> str:  # what -march=native looks at
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def load(path: Path) -> None:
    """Have the operations run in the library at `path` from now on.

    `run` keeps Python's lock (a single operation is too short to hand it over and wait for it to come back); `replay`
    releases it, so that the next step can be planned meanwhile.
    """
    global library
    try:
        held, released = ctypes.PyDLL(str(path)), ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"the built kernels cannot be loaded: {error}") from error
    for run in (held.vitrine_run, released.vitrine_run):
        run.argtypes, run.restype = (ctypes.c_char_p, ctypes.c_int64), ctypes.c_char_p
    held.vitrine_isa.restype = ctypes.c_char_p
    released.vitrine_set_threads.argtypes = (ctypes.c_int64,)
    library = SimpleNamespace(run=held.vitrine_run, replay=released.vitrine_run, isa=held.vitrine_isa().decode())
    library.set_threads = released.vitrine_set_threads
    library.set_threads(threads)


def set_threads(n: int) -> None:
    """Threads of the kernels, the caller's included."""
    global threads
    threads = n
    if library is not None:
        library.set_threads(n)
