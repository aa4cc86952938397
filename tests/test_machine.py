"""Threads and memory under every limit that a machine can set: the tightest counts, and is named."""

import os
import re

import pytest
import tiny

from generate import LLM
from native import machine

MIB = 2**20


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A machine of eight processors and 8 GiB; write(path, text) adds a file of its."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    write("proc/meminfo", f"MemTotal: 9 kB\nMemAvailable:   {8 * 2**20} kB\n")
    return write


VERSION_2 = "0::{group}\n", "30 24 0:26 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
VERSION_1 = (
    "11:name=systemd:/else\n4:memory:{group}\n1:cpu,cpuacct:{group}\n0::/else\n",
    "31 24 0:27 {top} /sys/fs/cgroup rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 24 0:28 {top} /sys/fs/cgroup rw - cgroup cgroup rw,memory\n33 24 0:29 / /sys/fs/else rw - cgroup2 none rw\n",
)


def mount(root, version: tuple[str, str], group: str, top: str = "/") -> None:
    root("proc/self/cgroup", version[0].format(group=group))
    root("proc/self/mountinfo", "22 27 0:21 / /proc rw - proc proc rw\n" + version[1].format(top=top))


QUOTAS_2 = [("max 100000", 8), ("250000 100000", 2), ("200000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8)]
QUOTAS_1 = [("-1", 8), ("250000", 2), ("50000", 1)]


@pytest.mark.parametrize("version, quotas", [(VERSION_2, QUOTAS_2), (VERSION_1, QUOTAS_1)])
@pytest.mark.parametrize(
    "group, top, folder",
    [("/", "/", ""), ("/a/b", "/", "a/b/"), ("/a/b", "/", "a/"), ("/a/b/c", "/a", "b/c/"), ("/a", "/x", "")],
)
def test_a_quota_at_any_level_bounds_the_threads(root, version, quotas, group, top, folder):
    mount(root, version, group, top)
    for quota, threads in quotas:
        if version is VERSION_2:
            root(f"sys/fs/cgroup/{folder}cpu.max", quota + "\n")
        else:
            root(f"sys/fs/cgroup/{folder}cpu.cfs_quota_us", quota + "\n")
            root(f"sys/fs/cgroup/{folder}cpu.cfs_period_us", "100000\n")
        usable, reason = machine.usable_threads()
        assert usable == threads and ("quota" in reason) == (threads < 8), (quota, reason)


def test_the_tightest_of_processors_affinity_and_environment_bounds_the_threads(root, monkeypatch):
    assert machine.usable_threads() == (8, "one for each processor")
    for words, threads in {"3": 3, "2,4": 2, " 16": 8, "0": 8, "": 8, "many": 8, "-2": 8}.items():
        monkeypatch.setenv("OMP_NUM_THREADS", words)
        assert machine.usable_threads()[0] == threads, words
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5})
    assert machine.usable_threads() == (1, "the CPU affinity of the process")


@pytest.mark.parametrize(
    "version, limit, used, idle, none",
    [
        (VERSION_2, "memory.max", "memory.current", "inactive_file", "max"),
        (VERSION_1, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", str(2**63 - 4096)),
    ],
)
def test_the_tightest_limit_less_use_and_a_margin_bounds_the_memory(root, version, limit, used, idle, none):
    mount(root, version, "/a/b")
    for folder, most, use in (("", none, 4000), ("a/", 600 * MIB, 400 * MIB), ("a/b/", none, 200 * MIB)):
        root(f"sys/fs/cgroup/{folder}{limit}", f"{most}\n")
        root(f"sys/fs/cgroup/{folder}{used}", f"{use}\n")
        root(f"sys/fs/cgroup/{folder}memory.stat", f"cache 7\n{idle} {100 * MIB}\nanon 5\n")
    free, bound = machine.usable_memory()
    assert free == 270 * MIB and "limit of 600 MiB" in bound and bound.endswith(f"a/{limit}")
    root(f"sys/fs/cgroup/a/{limit}", f"{none}\n")
    free, bound = machine.usable_memory()
    assert free == int(8 * 2**30 * 0.9) and bound == "available memory of the machine"
    root(f"sys/fs/cgroup/a/b/{limit}", f"{50 * MIB}\n")  # less than is used already
    assert machine.usable_memory()[0] == 0


def test_the_start_lines_name_the_bounds_and_a_pool_beyond_them_is_warned_of(root, tmp_path, capsys):
    folder = str(tiny.hf_folder(tmp_path / "m", "llama"))
    mount(root, VERSION_2, "/job")
    root("sys/fs/cgroup/job/memory.max", str(4 * MIB))
    root("sys/fs/cgroup/job/cpu.max", "150000 100000")
    pool = LLM(folder, kernels="reference", quiet=False).kv.nbytes
    err = capsys.readouterr().err
    assert pool <= 4 * MIB and "threads: 1 (a cgroup's quota of 1.5 CPUs" in err and "warning" not in err
    assert re.search(r"KV pool: .*; 4 MiB of memory are free \(a cgroup's limit of 4 MiB", err)
    LLM(folder, kernels="reference", kv_memory=8 * MIB, threads=2, quiet=False)
    err = capsys.readouterr().err
    assert "threads: 2 (as was asked for)" in err
    assert re.search(r"warning: the KV pool takes 8 MiB when it fills, but 4 MiB .*limit of 4 MiB", err)


@pytest.mark.parametrize("cpu", ["max", "0 0", "x y", "", "\n"])
def test_files_that_say_nothing_bound_nothing(root, cpu):
    mount(root, VERSION_2, "/a")
    root("proc/self/cgroup", "no group\n0::/a\n")
    root("proc/self/mountinfo", "no mount\n24 30 0:21 / /x rw - cgroup2\n" + VERSION_2[1].format(top="/"))
    root("sys/fs/cgroup/a/cpu.max", cpu)
    root("sys/fs/cgroup/a/memory.max", str(600 * MIB))
    root("sys/fs/cgroup/a/memory.current", "max")
    root("sys/fs/cgroup/a/memory.stat", f"inactive_file {500 * MIB}\n")
    assert machine.usable_threads()[0] in (1, 8) and machine.usable_memory()[0] == int(600 * MIB * 0.9)


def test_a_quota_without_a_period_has_the_default_one_and_mounts_may_have_blanks(root):
    root("proc/self/cgroup", "0::/\n")
    root("proc/self/mountinfo", "30 24 0:26 / /sys/my\\040group rw - cgroup2 cgroup2 rw\n")
    root("sys/my group/cpu.max", "250000\n")
    assert machine.usable_threads()[0] == 2
