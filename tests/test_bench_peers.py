"""The peers compute the same model on the same prompts, and a comparison takes turns and names who failed."""

import json
import subprocess
import sys
from argparse import Namespace
from types import SimpleNamespace

import pytest
import tiny
import torch

import bench
import checkpoint
import naive
from benchmarks import peers as bench_peers

SIZES = ["--prompt", "20", "--gen", "3", "--batch", "1", "2", "--repeat", "1", "--threads", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny.hf_folder(tmp_path_factory.mktemp("m") / "m", "llama"))


def weights_of(ckpt) -> dict[str, torch.Tensor]:
    return {name: ckpt.tensor(name).float() for name in ckpt.names()}


@pytest.mark.parametrize("arch", ("llama", "mistral", "qwen2", "qwen3", "gemma3"))
@pytest.mark.parametrize("container", ["folder", "GGUF"])
def test_transformers_computes_our_model(arch, container, tmp_path):
    extra = {} if arch in ("qwen2", "gemma3") else {"tie_word_embeddings": arch == "qwen3"}
    path = tiny.hf_folder(tmp_path / "m", arch, **extra)
    if container == "GGUF":
        path = tiny.gguf_file(path, tmp_path / "m.gguf", "Q4_1")
    ckpt = checkpoint.open_checkpoint(path)
    ids = list(range(5, 25))
    with torch.inference_mode():
        theirs = bench_peers.hf_model(ckpt)(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(theirs, naive.forward(weights_of(ckpt), ckpt.config, ids), rtol=1e-4, atol=1e-4)


def test_its_greedy_loop_decodes_every_sequence_by_itself(folder):
    peer = bench_peers.Transformers(folder, 1, 2, 64)
    prompts = [bench_peers.random_prompt(320, 16, seed) for seed in (0, 1)]
    seen, step = [], peer._next
    peer._next = lambda ids, cache: seen.append(step(ids, cache)) or seen[-1]
    assert peer.decode(prompts, 4) > 0
    ckpt = checkpoint.open_checkpoint(folder)
    for row, prompt in enumerate(prompts):
        ids = list(prompt)
        for made in seen:
            ids.append(naive.greedy(naive.forward(weights_of(ckpt), ckpt.config, ids)[-1]))
            assert int(made[row]) == ids[-1]


class FakeLlama(SimpleNamespace):
    """As much of llama_cpp as the peer touches; keeps the rows of every pass."""

    def __init__(self):
        super().__init__(passes=[], cleared=0)

    def __getattr__(self, name):
        if name.endswith("default_params"):
            return SimpleNamespace
        return lambda *args: 1

    def llama_vocab_n_tokens(self, vocab):
        return 320

    def llama_batch_init(self, n, embeddings, sequences):
        lists = {name: [None] * n for name in ("token", "pos", "logits", "n_seq_id")}
        return SimpleNamespace(**lists, seq_id=[[None] for _ in range(n)])

    def llama_memory_clear(self, memory, data):
        self.cleared += 1

    def llama_decode(self, context, batch):
        self.passes.append(
            [(batch.token[i], batch.pos[i], batch.seq_id[i][0], batch.logits[i]) for i in range(batch.n_tokens)]
        )
        return 0


def test_llama_cpp_is_given_the_same_work(monkeypatch):
    fake = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    args = Namespace(engine="llama.cpp", model="m.gguf", threads=1, prompt=20, gen=3, batch=[2], repeat=1)
    result = bench_peers.measure(args)
    assert set(result) == {"load_s", "prefill_tok_s", "decode_tok_s"} and len(result["decode_tok_s"]["2"]) == 1
    warm_up, prefill, first, second, *steps = fake.passes
    assert warm_up == prefill and [row[0] for row in prefill] == bench_peers.random_prompt(320, 20, 0)
    assert [row[3] for row in prefill] == [False] * 19 + [True] and fake.cleared == 3
    assert [row[0] for row in second] == bench_peers.random_prompt(320, 16, 1)
    assert [[row[1:] for row in rows] for rows in steps] == [[(p, 0, True), (p, 1, True)] for p in (16, 17, 18)]
    fake.llama_decode = lambda context, batch: 1
    with pytest.raises(ValueError, match="llama.cpp failed on a batch of 20 tokens"):
        bench_peers.measure(args)


def test_versus_takes_turns_with_several(folder, tmp_path, capsys):
    log = tmp_path / "log"
    peer = tmp_path / "peer.py"
    peer.write_text(
        f"import json, sys\nopen({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))\n"
        "print(json.dumps({'prefill_tok_s': [1.0], 'decode_tok_s': {'1': [2.0], '2': [4.0]}}))\n"
    )
    own = f"{sys.executable} {peer}"
    flags = ["--model", folder, "--num-blocks", "60", "--peer", "transformers", "--peer", own, "--peer", own, *SIZES]
    assert bench.main(["versus", *flags, "--rounds", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"prefill", "decode x1", "decode x2"}
    assert log.read_text().splitlines() == ["--prompt 20 --gen 3 --repeat 1 --threads 1 --batch 1 2"] * 2
    assert all(list(row["peers"]) == ["transformers", "peer", "peer (2)"] for row in found.values())
    row = found["decode x2"]
    assert row["peers"]["transformers"]["tok_s"] > 0
    assert row["peers"]["peer"]["ratio"] == round(row["vitrine"] / 4.0, 2)


@pytest.mark.parametrize(
    "peer, said",
    [
        ("llama.cpp:python:missing.gguf", "no file 'python'"),
        (f"llama.cpp:{sys.executable}:missing.gguf", "no file 'missing.gguf'"),
        (f"llama.cpp:{sys.executable}:{__file__}", "has no llama_cpp"),
        (" ", "--peer is empty"),
        (f"{sys.executable} -c 'raise SystemExit(\"out of luck\")'", "out of luck"),
        (f"{sys.executable} -c 'print(5, 6)'", "printed no JSON line"),
    ],
)
def test_a_peer_that_cannot_run_is_named(peer, said, folder, capsys):
    flags = ["--model", folder, "--num-blocks", "60", "--peer", peer, *SIZES, "--rounds", "1"]
    assert bench.main(["versus", *flags]) == 2
    assert said in capsys.readouterr().err


def test_a_python_without_torch_can_run_a_peer():
    """As the environment of llama.cpp: the script gets as far as the library it is for."""
    code = "import runpy, sys; sys.modules['torch'] = sys.modules['llama_cpp'] = None; sys.argv[1:] = ['llama.cpp', "
    code += f"'--model', 'm.gguf']; runpy.run_path({bench_peers.__file__!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "has no llama_cpp: name the Python of its environment" in done.stderr


def test_without_transformers_the_peer_says_what_to_install(folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert bench_peers.main(["transformers", "--model", folder]) == 2
    assert "pip install -r requirements-dev.txt" in capsys.readouterr().err


RATE = '{"prefill_tok_s": [1], "decode_tok_s": {"%s": [%s]}}'


@pytest.mark.parametrize(
    "printed", ["{}", "[]", '{"prefill_tok_s": []}', RATE % (8, 1), RATE % (1, 0), RATE % (1, '"1"')]
)
def test_a_peer_that_prints_something_else_is_named(printed):
    with pytest.raises(ValueError, match="other printed no positive rate .* keys of `bench.py decode`"):
        bench_peers.medians_of("other", [sys.executable, "-c", f"print({printed!r})"], [1])
