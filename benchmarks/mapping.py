"""What mapping the checkpoint buys: two processes map it or read it, and report what they hold.

Problem. Reading a file of weights copies it from the page cache into memory of the process, and a second process makes
another copy. Both copies count while the model is built, and neither is needed.

Idea. Two children with one switch, and the system's figures for them (/proc: VmHWM is the peak,
RssAnon what is private, Pss what is shared divided by the number of those who share it):

    mapped   page cache [ file ] <── child 1, child 2 look at the same pages                 Pss: half the file each
    whole    page cache [ file ] ──copy──> child 1 [ file ]   ──copy──> child 2 [ file ]     Pss: the file each

The engine itself always maps; reading is done here, in the child, before the same loader runs. The first child goes on
to a loaded model, for the time and the peak of a start; both look at every page; the Pss of the second is measured.

Source: llama.cpp, which maps its files since 2023. Left out: cold page caches, since dropping them takes a privilege.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.lab import Lab, Run, megabytes, middle, ratio
from benchmarks.scheduling import Result
from checkpoint import Checkpoint, open_checkpoint
from model import Transformer
from quantize import set_activations


def memory() -> dict[str, int]:
    """Bytes of this process: Rss, its peak VmHWM, RssAnon and RssFile, and Pss. Raises ValueError without a /proc."""
    sizes = {}
    try:
        for name in ("status", "smaps_rollup"):
            for line in Path("/proc/self", name).read_text().splitlines():
                key, _, value = line.partition(":")
                if value.endswith("kB"):
                    sizes[key] = int(value.split()[0]) * 1024
    except OSError as error:
        raise ValueError(f"memory is read from /proc of Linux, which is not here ({error}): leave mmap out") from None
    return {key: sizes[key] for key in ("VmRSS", "VmHWM", "RssAnon", "RssFile", "Pss")}


def read_whole(ckpt: Checkpoint) -> None:
    """Let the checkpoint hand out tensors from private memory, read at once."""
    if ckpt.gguf is not None:
        data, table = torch.from_numpy(np.fromfile(ckpt.path, np.uint8)), ckpt.gguf.tensors
        ckpt.gguf.raw = lambda name: data[table[name].offset : table[name].offset + table[name].nbytes]
    else:
        tensors = {name: ckpt.tensor(name).clone() for name in ckpt.names()}
        ckpt.tensor = tensors.__getitem__


def look_at_all(ckpt: Checkpoint) -> list[torch.Tensor]:
    """Every tensor as the file has it, with one byte of each of its pages read."""
    if ckpt.gguf is not None:
        tensors = [ckpt.gguf.raw(name) for name in ckpt.gguf.tensors]
    else:
        tensors = [ckpt.tensor(name).view(torch.uint8).flatten() for name in ckpt.names()]
    for tensor in tensors:
        tensor[:: 1 << 12].sum()
    return tensors


def child(model: str, read: bool, quant: str | None, load: bool) -> None:
    """Open the checkpoint (and load the model), print the times and the memory as a line of JSON, hold it all."""
    torch.set_num_threads(1)
    before, began = memory(), time.perf_counter()
    ckpt = open_checkpoint(model)
    if read:
        read_whole(ckpt)
    figures = {"before": before, "open s": time.perf_counter() - began}
    if load:
        transformer = Transformer(ckpt, quant, torch.float32, max_model_len=512)
        set_activations(transformer, "int8")
        figures |= {"ready s": time.perf_counter() - began, "peak": memory()["VmHWM"]}
        figures["model"] = transformer.weight_bytes
    tensors = look_at_all(ckpt)
    figures |= {"file": sum(tensor.nbytes for tensor in tensors), "after": memory()}
    print(json.dumps(figures), flush=True)
    sys.stdin.read()  # until the parent ends this process


@contextlib.contextmanager
def running_child(*arguments) -> Iterator[dict]:
    """What a `child` found, while it still holds its memory."""
    command = [sys.executable, "-m", "benchmarks.mapping", json.dumps(arguments)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        line = process.stdout.readline()
        if not line:
            raise ValueError("a child that was to open the checkpoint ended; its error stands above")
        yield json.loads(line)
    finally:
        process.kill()
        process.communicate()


def mapped_weights(lab: Lab) -> Result:
    """The same checkpoint opened by two processes, mapped or read whole; the first builds a model from it."""
    model, quant = str(lab.flags.get("model", "smollm2")), lab.flags.get("quant")
    sizes = {}

    def side(read: bool) -> Run:
        with running_child(model, read, quant, True) as loaded, running_child(model, read, quant, False) as opened:
            sizes.update(file=loaded["file"], model=loaded["model"])
            clock = {key: loaded[key] for key in ("open s", "ready s")}
            clock["MB at the peak"] = megabytes(loaded["peak"] - loaded["before"]["VmRSS"])
            for key, name in (("RssAnon", "private MB of the second"), ("Pss", "MB of the second, its share")):
                clock[name] = megabytes(opened["after"][key] - opened["before"][key])
            return Run({"MB copied": megabytes(loaded["file"]) if read else 0.0}, clock)

    sides = lab.alternate(side, {"whole": True, "mapped": False})
    a, b = sides["whole"], sides["mapped"]
    share = [middle(x, "MB of the second, its share") for x in (a, b)]
    return (
        sides,
        f"the file is open {ratio(a, b, 'open s')} and the model ready {ratio(a, b, 'ready s')} faster; "
        f"{middle(a, 'MB at the peak'):.0f} -> {middle(b, 'MB at the peak'):.0f} MB at the peak; a second process "
        f"costs {share[0]:.0f} -> {share[1]:.0f} MB",
        f"no copy: a peak of {sizes['model'] / 1e6:.0f} MB, the model itself, and {sizes['file'] / 2e6:.0f} MB, half "
        "the file, for each of two processes",
    )


if __name__ == "__main__":
    child(*json.loads(sys.argv[1]))
