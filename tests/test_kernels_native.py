"""Tapes, refusals and builds: the C++ kernels as a library that must never crash the process."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kernel_cases import copies, layer_inputs, one_layer, ops

import kernels
from native import build
from native.tape import header

pytestmark = pytest.mark.usefixtures("native")

ROOT = Path(kernels.__file__).parent
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


def test_a_replayed_tape_equals_the_step_it_recorded_on_new_inputs():
    hidden, weights, state = layer_inputs()
    with kernels.record() as tape:
        out = one_layer(hidden, weights, state)
    other = torch.randn(3, 48)
    state["lens"].fill_(4)  # and every row one position later
    state["positions"].add_(1)
    state["slots"].add_(1)
    expected_state = copies(state)
    want = one_layer(other, weights, expected_state)
    hidden.copy_(other)
    tape.replay()
    assert torch.equal(out, want)
    assert torch.equal(state["k"], expected_state["k"])


def test_a_recorded_step_may_choose_rows_and_copy_them_out():
    hidden, weights, state = layer_inputs()
    rows, result = torch.tensor([2, 0]), torch.empty(2, 48)

    with kernels.record() as tape:
        result.copy_(one_layer(hidden, weights, state)[rows])
    hidden.copy_(torch.randn(3, 48))
    rows.copy_(torch.tensor([1, 2]))
    want = one_layer(hidden, weights, copies(state))[rows]
    tape.replay()
    assert torch.equal(result, want)
    rows[0] = 3
    with pytest.raises(ValueError, match="row index"):
        tape.replay()


def test_a_tape_gives_its_memory_out_again():
    hidden, weights, state = layer_inputs()
    tapes = []
    for n in (2, 12):
        with kernels.record() as tape:
            last = hidden
            for _ in range(n):
                last = one_layer(last, weights, state)
        tapes.append(tape)
    assert tapes[1].owned and len(tapes[1].owned) == len(tapes[0].owned)
    want = last.clone()
    last.fill_(float("nan"))
    tapes[1].replay()
    assert torch.equal(last, want)


def test_a_tape_hands_out_no_memory_that_is_in_use():
    x = torch.randn(3, 2, 8)
    with kernels.record() as tape:
        first = ops.silu_mul(x[0])
        second = ops.silu_mul(x[1])
        view = first[1:]
        del first
        third = ops.silu_mul(x[2])
    for _ in range(2):
        for i, (result, rows) in enumerate(((view, slice(1, 2)), (second, slice(2)), (third, slice(2)))):
            assert torch.equal(result, ops.silu_mul(x[i, rows].contiguous()))
        x.neg_()
        tape.replay()


def test_a_tape_keeps_its_inputs():
    x = torch.randn(3, 1000)
    with kernels.record() as tape:
        out = ops.silu_mul(x)
    want = out.clone()
    del x
    others = [torch.full((3, 1000), float("nan")) for _ in range(50)]  # one of them would lie where x was
    tape.replay()
    assert torch.equal(out, want) and others


def test_a_tape_holds_what_its_own_thread_computes():
    x = torch.randn(3, 8)
    y = -x
    with kernels.record() as tape:
        mine = ops.silu_mul(x)
        with ThreadPoolExecutor(1) as other:
            theirs = other.submit(ops.silu_mul, y).result()
    assert len(tape.words) == 1 and tape.owned == {mine.data_ptr()}
    want = theirs.clone()
    x.neg_()
    tape.replay()
    assert torch.equal(mine, want) and torch.equal(theirs, want)


def test_a_tape_refuses_what_it_could_not_replay():
    x, transposed = torch.randn(4, 4), torch.randn(4, 4).t()
    with pytest.raises(ValueError, match="aten.add"), kernels.record():
        ops.silu_mul(x + 1)
    with pytest.raises(ValueError, match="aten.add_"), kernels.record():
        ops.silu_mul(x.add_(1))
    with pytest.raises(ValueError, match="contiguous"), kernels.record():
        ops.silu_mul(transposed)
    with kernels.record(), pytest.raises(ValueError, match="already"), kernels.record():
        pass
    kernels.set_backend("reference")
    with pytest.raises(ValueError, match="reference"):
        kernels.record()


def test_wrong_arguments_are_refused_before_memory_is_touched():
    hidden, weights, state = layer_inputs()
    names = ("k", "v", "tables", "starts", "lens")

    def rope(positions=state["positions"][:1], slots=state["slots"][:1], width=64):
        caches = (state[n] for n in ("cos_sin", "k", "v"))
        return ops.rope_write_kv(torch.randn(1, width), positions, *caches, slots, 2)

    def attention(name: str, value: int):
        bad = copies(state)
        bad[name][..., -1] = value
        return ops.paged_attention(torch.randn(3, 2, 16), *(bad[n] for n in names), 0.25)

    for cause, call in {
        r"\[65, 48\]": lambda: ops.int4_linear(hidden, weights["qkv"], 650 // 10, 64),
        "bias has shape": lambda: ops.int4_linear(hidden, weights["qkv"], 64, 32, bias=torch.zeros(63)),
        "embedding table": lambda: ops.int4_embedding(torch.tensor([64]), weights["qkv"], 48, 32),
        "slot": lambda: rope(slots=torch.tensor([12])),
        "position": lambda: rope(positions=torch.tensor([8])),
        "need 64 and an even number up to 16": lambda: rope(width=80),
        "do not fit": lambda: ops.paged_attention(torch.randn(3, 2, 8), *(state[n] for n in names), 0.25),
        "block table": lambda: attention("tables", 3),
        "shorter": lambda: attention("lens", 2),
        "longer": lambda: attention("lens", 5),
        "query_start": lambda: attention("starts", 4),
        "group_size 48": lambda: kernels.pack_int4(torch.zeros(4, 48).byte(), torch.zeros(4, 2), torch.zeros(4, 2), 48),
        "backend 'cuda'": lambda: kernels.set_backend("cuda"),
        "threads": lambda: kernels.set_threads(0),
    }.items():
        with pytest.raises(ValueError, match=cause):
            call()


# -- builds


def start(**env: str) -> tuple[str, list[str]]:
    """The backend that a fresh process ends up with, and the lines it writes to stderr."""
    command = [sys.executable, "-c", "import kernels; print(kernels.set_backend('native'))"]
    result = subprocess.run(command, env=os.environ | env, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip(), result.stderr.splitlines()


def test_without_a_compiler_there_is_one_note_and_the_reference(tmp_path):
    backend, lines = start(PATH="", VITRINE_CACHE=str(tmp_path), CXX="")
    assert backend == "reference" and ["no C++ compiler" in line for line in lines] == [True, False], lines


@needs_compiler
def test_a_compiler_may_come_with_flags_and_is_reported_with_its_words(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRINE_CACHE", str(tmp_path))
    plain = build.build(header(), ("-O0",))
    monkeypatch.setenv("CXX", "g++ -g0")
    flagged = build.build(header(), ("-O0",))
    assert flagged.is_file() and flagged != plain
    monkeypatch.setenv("CXX", "g++ --no-such-flag")
    with pytest.raises(build.BuildError, match="no-such-flag"):
        build.build(header(), ("-O0",))
    assert {flagged, plain} == set(tmp_path.iterdir()), "nothing of a failed build stays"


@needs_compiler
def test_a_library_cut_in_half_is_built_again_and_never_loaded(tmp_path):
    env = {"VITRINE_CACHE": str(tmp_path), "CXX": "g++ -O0"}
    assert start(**env) == ("native", [])
    (library,) = tmp_path.iterdir()
    whole = library.read_bytes()
    library.write_bytes(whole[: len(whole) // 2])
    backend, (line,) = start(**env)
    assert backend == "native" and f"{library} is damaged: built again" in line
    assert library.read_bytes() == whole and start(**env) == ("native", [])


@pytest.fixture
def built(monkeypatch):
    """Builds that take no time: every one of them is noted, and gives the same library."""
    folders = []

    def compile_library(command, arguments, folder):
        folders.append(folder)
        (folder / "kernels.so").write_bytes(b"library" * 100)
        return folder / "kernels.so"

    monkeypatch.setattr(build, "compile_library", compile_library)
    return folders


@needs_compiler
@pytest.mark.parametrize("content", [b"", b"library" * 99, b"library" * 100 + b"\n", b"Library" + b"library" * 99])
def test_whatever_a_library_is_damaged_to_it_is_built_again(tmp_path, monkeypatch, capsys, built, content):
    monkeypatch.setenv("VITRINE_CACHE", str(tmp_path))
    library = build.build(header())
    assert build.build(header()) == library and len(built) == 1 and not capsys.readouterr().err
    for name in (library.name, f"{library.name[:-27]}{'0' * 24}.so"):
        library.rename(tmp_path / name).write_bytes(content)
        assert build.build(header()) == library and library.read_bytes() == b"library" * 100
        assert capsys.readouterr().err == f"kernels: {tmp_path / name} is damaged: built again\n"
        assert list(tmp_path.iterdir()) == [library]
    assert build.build(header()) == library and len(built) == 3


@needs_compiler
@pytest.mark.parametrize("nowhere", ["too long a name", "a file", "full", "a folder in its place", "no home"])
def test_where_nothing_can_be_kept_the_kernels_are_built_for_this_run(tmp_path, monkeypatch, capsys, built, nowhere):
    cache = tmp_path / ("x" * 300 if nowhere == "too long a name" else "cache")  # one cannot even ask for it
    monkeypatch.setenv("VITRINE_CACHE", str(cache))
    if nowhere == "a file":
        cache.write_text("")
    elif nowhere == "full":
        monkeypatch.setattr(shutil, "copy", lambda *_: Path("/dev/full").write_text("x"))
    elif nowhere == "a folder in its place":
        library = build.build(header())
        library.unlink()
        library.mkdir()
    elif nowhere == "no home":  # and a user whom the system does not know
        for name in ("VITRINE_CACHE", "XDG_CACHE_HOME", "HOME"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    library = build.build(header())
    assert library.read_bytes() == b"library" * 100 and library.parent == built[-1]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("kernels: ") and "built for this run only; set VITRINE_CACHE" in line


@needs_compiler
def test_the_avx512_version_compiles(tmp_path):
    (tmp_path / "arguments.h").write_text(header())
    source = str(ROOT / "native" / "kernels.cpp")
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-march=icelake-server", f"-I{tmp_path}", source]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and "kernels" not in result.stderr, result.stderr


CHILD = """
import sys, pytest
from native import cpu
print("isa", cpu.load(tuple(sys.argv[1].split())))
chosen = "reference or bits or padding or non_finite or 128 or canonical"
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", chosen, *sys.argv[2:]]))
"""


def run_against_build(flags: str, **env: str) -> str:
    """The comparisons with the references in a child process, against a library built with other flags."""
    files = [str(ROOT / "tests" / f"test_kernels{part}.py") for part in ("", "_attention", "_sampling")]
    command, env = [sys.executable, "-c", CHILD, flags, *files], {**os.environ, "KERNEL_EXAMPLES": "10", **env}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@needs_compiler
def test_the_plain_version_agrees_too():
    assert "isa plain" in run_against_build("-DVITRINE_PLAIN -O1")


@needs_compiler
def test_no_kernel_touches_memory_it_does_not_own():
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    run_against_build("-fsanitize=address -O1", LD_PRELOAD=runtime, ASAN_OPTIONS="detect_leaks=0")
