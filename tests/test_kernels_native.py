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

needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="no g++")


@pytest.fixture(autouse=True)
def native():
    """Every test starts on the native backend with two threads, and leaves the process as it found it."""
    before = kernels.backend()
    kernels.set_threads(2)
    yield kernels.set_backend("native")
    kernels.set_backend(before)


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


def test_a_tape_gives_its_memory_out_again_but_never_while_in_use():
    hidden, weights, state = layer_inputs()

    def layers(n):
        h = hidden
        for _ in range(n):
            h = one_layer(h, weights, state)
        return h

    with kernels.record() as short:
        layers(2)
    with kernels.record() as long:
        last = layers(12)
    assert long.owned and len(long.owned) == len(short.owned)
    want = layers(12)
    long.replay()
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
    with pytest.raises(ValueError, match="contiguous"), kernels.record():
        ops.silu_mul(transposed)
    with kernels.record(), pytest.raises(ValueError, match="already"), kernels.record():
        pass
    kernels.set_backend("reference")
    with pytest.raises(ValueError, match="reference"):
        kernels.record()


def test_wrong_arguments_are_refused_before_memory_is_touched():
    hidden, weights, state = layer_inputs()
    with pytest.raises(ValueError, match=r"\[65, 48\]"):
        ops.int4_linear(hidden, weights["qkv"], 650 // 10, 64)
    with pytest.raises(ValueError, match="bias has shape"):
        ops.int4_linear(hidden, weights["qkv"], 64, 32, bias=torch.zeros(63))
    with pytest.raises(ValueError, match="embedding table"):
        ops.int4_embedding(torch.tensor([64]), weights["qkv"], 48, 32)
    with pytest.raises(ValueError, match="slot"):
        ops.rope_write_kv(
            torch.randn(1, 64), state["positions"][:1], state["cos_sin"], state["k"], state["v"], torch.tensor([12]), 2
        )
    with pytest.raises(ValueError, match="position"):
        ops.rope_write_kv(
            torch.randn(1, 64), torch.tensor([8]), state["cos_sin"], state["k"], state["v"], torch.tensor([4]), 2
        )
    names = ("k", "v", "tables", "starts", "lens")
    for name, value, message in (
        ("tables", 3, "block table"),
        ("lens", 2, "shorter"),
        ("lens", 5, "longer"),
        ("starts", 4, "query_start"),
    ):
        bad = copies(state)
        bad[name][..., -1] = value
        with pytest.raises(ValueError, match=message):
            ops.paged_attention(torch.randn(3, 2, 16), *(bad[n] for n in names), 0.25)
    with pytest.raises(ValueError, match="group_size 48"):
        kernels.pack_int4(torch.zeros(4, 48, dtype=torch.uint8), torch.zeros(4, 2), torch.zeros(4, 2), 48)
    with pytest.raises(ValueError, match="backend 'cuda'"):
        kernels.set_backend("cuda")
    with pytest.raises(ValueError, match="threads"):
        kernels.set_threads(0)


def test_without_a_compiler_there_is_one_note_and_the_reference(tmp_path):
    code = "import kernels; print(kernels.set_backend('native'))"
    env = {**os.environ, "PATH": "", "VITRINE_CACHE": str(tmp_path), "CXX": ""}
    root = Path(kernels.__file__).parent
    result = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True)
    assert result.stdout.strip() == "reference", result.stderr
    assert result.stderr.count("no C++ compiler") == 1


@needs_compiler
def test_a_broken_compiler_is_reported_with_its_words(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRINE_CACHE", str(tmp_path))
    with pytest.raises(build.BuildError, match="no-such-flag"):
        build.build(header(), ("--no-such-flag",))
    assert not list(tmp_path.glob("*.so"))


@needs_compiler
def test_where_nothing_can_be_kept_the_kernels_are_built_for_this_run(tmp_path):
    code = "import kernels; print(kernels.set_backend('native'))"
    nowhere = str(tmp_path / ("x" * 300))  # too long a name: nobody can even ask whether it is there
    env = {**os.environ, "VITRINE_CACHE": nowhere, "TMPDIR": str(tmp_path), "CXX": "g++ -O0"}
    root = Path(kernels.__file__).parent
    result = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True)
    assert result.stdout.strip() == "native" and "VITRINE_CACHE" in result.stderr, result.stderr
    assert not list(tmp_path.rglob("*.so")), "it was left behind"


@needs_compiler
def test_the_avx512_version_compiles(tmp_path):
    source = Path(kernels.__file__).parent / "native" / "kernels.cpp"
    (tmp_path / "arguments.h").write_text(header())
    command = ["g++", "-std=c++17", "-fsyntax-only", "-Wall", "-march=icelake-server", f"-I{tmp_path}", str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and "kernels" not in result.stderr, result.stderr


CHILD = """
import sys, pytest
from native import cpu
print("isa", cpu.load(tuple(sys.argv[1].split())))
chosen = "reference or bits or padding or non_finite or 128 or canonical"
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", chosen, *sys.argv[2:]]))
"""


def run_against_build(flags, env=()):
    """The comparisons with the references in a child process, against a library built with other flags."""
    tests = Path(__file__).parent
    files = [str(tests / name) for name in ("test_kernels.py", "test_kernels_attention.py", "test_kernels_sampling.py")]
    result = subprocess.run(
        [sys.executable, "-c", CHILD, flags, *files],
        cwd=tests.parent,
        env={**os.environ, "KERNEL_EXAMPLES": "10", **dict(env)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


@needs_compiler
def test_the_plain_version_agrees_too():
    assert "isa plain" in run_against_build("-DVITRINE_PLAIN -O1")


@needs_compiler
def test_no_kernel_touches_memory_it_does_not_own():
    runtime = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    env = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    run_against_build("-fsanitize=address -O1", env)


@needs_compiler
def test_a_compiler_may_come_with_flags(tmp_path, monkeypatch):
    monkeypatch.setenv("VITRINE_CACHE", str(tmp_path))
    plain = build.build(header(), ("-O0",))
    monkeypatch.setenv("CXX", "g++ -g0")
    flagged = build.build(header(), ("-O0",))
    assert flagged.is_file() and flagged != plain
    monkeypatch.setenv("CXX", "g++ --no-such-flag")
    with pytest.raises(build.BuildError, match="no-such-flag"):
        build.build(header(), ("-O0",))
