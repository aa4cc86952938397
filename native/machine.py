"""What this process may use of its machine: how many threads, how many bytes, and who says so.

A container has a quota of processor time and a limit of memory, a job is pinned to some processors, a shell sets
OMP_NUM_THREADS: the tightest counts. What a control group (cgroup) may use holds for all groups below it, so every
level is read, from the process's own up to where the hierarchy is mounted:

    /proc/self/cgroup      4:memory:/docker/abc    0::/user/job     version 1 has a hierarchy for each controller, 2 one
    /proc/self/mountinfo   where a hierarchy is mounted, and which of its groups is the top one there
    a group's files        memory.limit_in_bytes   memory.max       "max", -1 and 2**63 - 4096 stand for no limit
                           cpu.cfs_quota_us        cpu.max

Source: the kernel's cgroup-v1 and cgroup-v2 documents. Left out: swap, and limits that only slow down (memory.high).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
OCTAL = re.compile(r"\\([0-7]{3})")  # how mountinfo writes a blank
# Fields four and five of a line are what is mounted and where; behind " - " stand the kind and, last, its options.
MOUNT = re.compile(r"^\S+ \S+ \S+ (\S+) (\S+) .*- (\S+) .*?(\S+)$", re.MULTILINE)
MARGIN = 0.1  # of the free bytes, for what is computed beside the pool


def read(path: Path) -> str:
    """The text of a small file; "" where there is none, or none that may be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def number(text: str) -> int:
    """The number a file holds; 0 where it holds none."""
    return int(text) if text.isdecimal() else 0


def groups(controller: str) -> Iterator[Path]:
    """The folders of the groups that this process is in, for one controller and in both versions."""
    paths: dict[str, str] = {}  # controller, or "" for version 2 -> group
    for line in re.findall(r"^\d+:(.*?):(.*)$", read(ROOT / "proc/self/cgroup"), re.MULTILINE):
        paths |= dict.fromkeys(line[0].split(","), line[1])
    for line in MOUNT.findall(read(ROOT / "proc/self/mountinfo")):
        top, mount, kind, options = (OCTAL.sub(lambda match: chr(int(match[1], 8)), part) for part in line)
        name = "" if kind == "cgroup2" else controller
        if name not in paths or not (kind == "cgroup2" or kind == "cgroup" and controller in options.split(",")):
            continue
        inside = os.path.relpath(paths[name], top)
        parts = [] if inside.startswith(".") else inside.split("/")  # a group outside of the mount is seen as its top
        for depth in range(len(parts), -1, -1):
            yield ROOT.joinpath(mount.lstrip("/"), *parts[:depth])


def usable_threads() -> tuple[int, str]:
    """The tightest of all limits, at least 1, and its name."""
    limits = {"one for each processor": os.cpu_count() or 1}
    if hasattr(os, "sched_getaffinity"):
        limits["the CPU affinity of the process"] = len(os.sched_getaffinity(0))
    if match := re.match(r"\s*0*([1-9]\d*)", os.environ.get("OMP_NUM_THREADS", "")):
        limits[f"OMP_NUM_THREADS={match[1]}"] = int(match[1])
    for group in groups("cpu"):
        version_1 = [read(group / "cpu.cfs_quota_us"), read(group / "cpu.cfs_period_us")]
        time, period, *_ = [*(read(group / "cpu.max").split() or version_1), ""]
        if time.isdecimal():
            quota = int(time) / (number(period) or 100_000)  # microseconds; the default
            limits[f"a cgroup's quota of {quota:g} CPUs, {group}"] = int(quota)  # more would wait for the next period
    bound = min(limits, key=limits.get)
    return max(1, limits[bound]), bound


def usable_memory(device: str = "cpu") -> tuple[int, str]:
    """Bytes that are free on a device under the tightest of all limits, less a margin, and the name of that limit."""
    if device.startswith("cuda"):
        import torch

        free = {"memory of the GPU": torch.cuda.mem_get_info(device)[0]}
    elif match := re.search(r"MemAvailable:\s+(\d+) kB", read(ROOT / "proc/meminfo")):
        free = {"available memory of the machine": int(match[1]) * 1024}
    else:  # not Linux: all of it is the best guess there is
        free = {"memory of the machine": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    for group in groups("memory") if not device.startswith("cuda") else ():
        for name, use, idle in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            if (limit := read(group / name)).isdecimal():
                # Files that were read and are not in use count as used, but are given up when memory is needed.
                cached = re.search(rf"^{idle} (\d+)", read(group / "memory.stat"), re.MULTILINE)
                used = max(0, number(read(group / use)) - (int(cached[1]) if cached else 0))
                free[f"a cgroup's limit of {int(limit) / 2**20:,.0f} MiB, {group / name}"] = int(limit) - used
    bound = min(free, key=free.get)
    return max(0, int(free[bound] * (1 - MARGIN))), bound
