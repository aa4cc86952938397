"""Each mechanism's effect has the right sign in counted work, on a tiny random model; no test here reads a clock."""

import itertools
import json
import re
from functools import partial
from pathlib import Path

import pytest
import tiny

import bench
import generate
import kernels
from benchmarks import claims as bench_claims
from benchmarks import guessing as bench_guessing
from benchmarks import scheduling as bench_scheduling
from benchmarks.claims import CLAIMS, RUNS, as_markdown, columns, measure
from benchmarks.lab import Lab, Result, Run, Sizes, answer_of, gathered, run_all
from compiled import CompiledRunner
from drafting.budget import StepCost

ROOT = Path(bench_claims.__file__).parent.parent
SMALL = Sizes(
    rounds=2, trace_requests=200, batch_requests=10, shared=64, long_prompt=200, budgets=(32, 64), lpm_requests=60,
    configurations=("float32", "bfloat16", "int8", "int4"), batches=(1, 3), decoded=6, text=60, guessed=24, records=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(tiny.hf_folder(tmp_path_factory.mktemp("bench") / "m", "llama", max_position_embeddings=2048))


@pytest.fixture(scope="module")
def lab(folder):
    return Lab({"model": folder, "threads": 1, "num_blocks": 400, "max_model_len": 512}, SMALL)


@pytest.fixture(scope="module")
def rows(lab):
    with pytest.MonkeyPatch.context() as patch:
        eager = partial(CompiledRunner, backend="eager")  # counts graphs, compiles none
        patch.setattr(generate, "CompiledRunner", eager)
        costs = StepCost({1: 1.0, 2: 1.01, 256: 2.0})  # not measured: how much is guessed depends on them
        patch.setattr(StepCost, "measure", lambda *args: costs)
        same = {"temperature": 0.0, "logit_bias": {5: 100}}  # the one text that a random model repeats
        patch.setitem(bench_guessing.TEXTS, "loop", (bench_guessing.TEXTS["story"][0], same))
        found = {}
        for name in CLAIMS:
            found[name] = measure(lab, name)
            lab.close()
        return found


def counted(rows, name):
    return {side: found["counted"] for side, found in rows[name]["sides"].items()}


def test_no_switch_changes_an_answer_and_every_row_is_complete(rows):
    for name, row in rows.items():
        alone = CLAIMS[name].get("alone")
        assert row["same_answers"] is (None if alone else True)
        assert row["answers"].startswith(alone or "the same on all sides")
        for key in ("mechanism", "claim", "source", "setting", "measured", "floor", "why", "answers"):
            assert row[key] and isinstance(row[key], str), (name, key)
        assert re.search(r"\d", row["floor"]), f"a floor is a figure: {row['floor']}"
        for side in row["sides"].values():
            assert side["counted"] and all(len(values) == SMALL.rounds for values in side["clock"].values())


FEWER = """
kv-memory: steps: paged, one token a block < paged < contiguous
kv-memory: held slots with a token: contiguous < paged < paged, one token a block
kv-memory: tokens a step: contiguous < paged
batching: steps: continuous < static
batching: tokens computed: continuous = static
chunked-prefill: largest step: chunks of 32 < chunks of 64 < whole
chunked-prefill: tokens computed: chunks of 32 = chunks of 64 = whole
preemption: swaps: recompute < swap
preemption: recomputed tokens: swap < recompute
lpm: hit rate: fcfs, room for 2 < lpm, room for 2
lpm: tokens computed: lpm, room for 2 < fcfs, room for 2
lpm: evicted blocks: lpm, room for 2 < fcfs, room for 2
quantisation: MB a step: int4 < int8 < bfloat16 < float32
compile: Python calls a step: int4, compiled < int4, calls
compile: steps captured: int4, calls < int4, compiled
compile: graphs compiled: float32, calls < float32, compiled
kernels: Python calls a step: native < reference
structured: valid: free < mask = mask and jumps
structured: drawn: mask and jumps < mask
structured: tokens: mask = mask and jumps
"""


@pytest.mark.parametrize("line", FEWER.strip().splitlines())
def test_a_switch_saves_what_it_is_for(rows, line):
    name, key, order = line.split(": ")
    sides = counted(rows, name)
    for pair in itertools.pairwise(re.split(" (?=[<=] )", order)):
        a, b = (sides[re.sub("^[<=] ", "", side)][key] for side in pair)
        assert a == b if pair[1].startswith("=") else a < b, pair


def test_forks_hold_the_prompt_once_and_compute_it_once(rows):
    apart, forks = counted(rows, "fork").values()
    assert apart["most blocks held"] == 4 * (4 + 2) and forks["most blocks held"] == 4 + 4 * 2
    assert apart["blocks copied"] == 0 and forks["blocks copied"] == 3  # the last owner writes in place
    assert apart["tokens computed"] - forks["tokens computed"] == 3 * (SMALL.shared + 8)


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_prefix_caches_save_exactly_the_tokens_they_find(rows, cache):
    sides = counted(rows, "prefix-cache")
    for workload in bench_scheduling.WORKLOADS:
        none, cached = sides[f"{workload}, none"], sides[f"{workload}, {cache}"]
        assert none["cached tokens"] == 0 and none["prompt tokens"] == cached["prompt tokens"]
        assert cached["tokens computed"] == none["tokens computed"] - cached["cached tokens"]
        first = [side["before the median TTFT"] for side in (cached, none)]
        assert first[0] == first[1] if workload == "no reuse" else first[0] < first[1]
        assert (cached["cached tokens"] > 0.3 * none["prompt tokens"]) == (workload != "no reuse")
    assert sides[f"no reuse, {cache}"]["cached tokens"] == 0


def test_swapping_saves_exactly_what_was_computed_twice(rows):
    again, swap = counted(rows, "preemption").values()
    assert swap["recomputed tokens"] == again["swaps"] == 0 < swap["preemptions"]
    assert again["tokens computed"] == swap["tokens computed"] + again["recomputed tokens"]


def test_fewer_bits_are_hardly_any_surprise(rows):
    sides = counted(rows, "quantisation")
    assert sides["bfloat16"]["MB a step"] == pytest.approx(sides["float32"]["MB a step"] / 2, rel=0.02)
    assert sides["int8"]["perplexity"] == pytest.approx(sides["float32"]["perplexity"], rel=0.1)


def test_compiled_steps_need_hardly_any_calls_and_two_graphs(rows):
    calls, tape, _, dense = counted(rows, "compile").values()
    assert tape["Python calls a step"] < calls["Python calls a step"] / 5 and dense["graphs compiled"] == 2
    assert rows["compile"]["answers"] == "the same on all sides; float32: rounding differs"


def test_overlap_plans_ahead_and_computes_the_same(rows):
    sides = counted(rows, "overlap")
    for n in SMALL.batches:
        off, on = sides[f"{n} at a time, off"], sides[f"{n} at a time, on"]
        assert off["planned ahead"] == 0 < on["planned ahead"] < on["steps"]
        assert off["steps"] == on["steps"] and off["tokens computed"] == on["tokens computed"]


def test_guesses_save_as_many_steps_as_were_right(rows):
    sides = counted(rows, "speculation")
    for text in bench_guessing.TEXTS:
        for n in SMALL.batches:
            off, ngram = sides[f"{text} x{n}, off"], sides[f"{text} x{n}, ngram"]
            assert off["guesses"] == 0 and ngram["accepted"] <= ngram["guesses"] and ngram["tokens a step"] >= 1
            assert ngram["steps"] == off["steps"] - ngram["accepted"] if n == 1 else ngram["steps"] <= off["steps"]
    assert sides["loop x1, ngram"]["steps"] < sides["loop x1, off"]["steps"] / 2


def test_every_token_of_a_structured_answer_is_drawn_or_forced(rows):
    for side in counted(rows, "structured").values():
        assert side["drawn"] + side["forced"] == side["tokens"] and side["steps"] == side["drawn"]


RECORD = '{"full_name": "A", "place_of_birth": "B", "year_of_birth": %s}'


def test_validity_of_a_record():
    assert bench_guessing.is_person(RECORD % 1900 + " and more")
    for text in (RECORD % 900, RECORD % "true", RECORD % '"1900"', RECORD[:45] + "}", "[1]", RECORD[:20]):
        assert not bench_guessing.is_person(text)


# ---- the lab


def test_sides_are_run_in_turn():
    order = []
    Lab({}, Sizes(rounds=3)).alternate(lambda name: order.append(name) or Run({"n": 1}), ["a", "b"])
    assert "".join(order) == "ababab"


def test_rounds_that_did_different_work_are_no_measurement():
    for rounds in ([Run({"steps": 1}), Run({"steps": 2})], [Run({}, answers=[[1]]), Run({}, answers=[[2]])]):
        with pytest.raises(RuntimeError, match="x: two rounds did not do the same work"):
            gathered("x", rounds)


def test_engines_of_a_row_are_let_go_and_the_process_is_turned_back(lab):
    own = lab.llm, kernels.backend()
    lab.open(kernels="reference")
    assert kernels.backend() == "reference" and len(lab._process) == 2
    lab.close()
    assert (lab.llm, kernels.backend()) == own and len(lab._process) == 1


def broken(lab):
    raise OSError("no such thing")


def test_a_failed_request_is_an_error_not_a_fast_answer(lab, monkeypatch):
    scheduler = lab.scheduler()
    monkeypatch.setattr(lab.llm.runner, "run", broken)
    with pytest.raises(ValueError, match="no such thing"):
        run_all(lab.llm, [lab.llm.add([1, 2, 3], answer_of(2))])
    assert scheduler.stats()["live"] == 0


def test_a_pool_too_small_for_the_experiment_is_named(lab):
    with pytest.raises(ValueError, match="needs 5000 KV blocks, the pool has 400: raise --num-blocks"):
        lab.scheduler(num_blocks=5000)


# ---- the command


def two_sides(lab):
    return Result("measured", "1x", lab.alternate(lambda i: Run({"n": 1}, answers=[[i]]), {"a": 1, "b": 2}))


@pytest.fixture
def experiment(monkeypatch):
    """Put a function in the place of an experiment."""
    return partial(monkeypatch.setitem, RUNS)


def claims(folder, out, *flags, only=("lpm",)) -> int:
    command = ["claims", "--model", folder, "--quick", "--json", "--out", str(out), "--threads", "1"]
    return bench.main([*command, "--only", *only, *flags])


def saved(out) -> dict:
    return json.loads((out / "claims.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("flags", "cause"),
    [(["--policy", "fcfs"], "--policy would change nothing"), (["--overlap"], "--overlap would change nothing")]
    + [(["--fresh"], "it measures again"), (["--out", __file__], "File exists")],
)
def test_what_makes_no_sense_is_refused_before_anything_is_loaded(flags, cause, capsys):
    assert bench.main(["claims", "--only", "lpm", "--quick", "--model", "never loaded", *flags]) == 2
    assert cause in capsys.readouterr().err


def test_the_whole_command_runs_quick_on_a_tiny_model(folder, tmp_path, capsys):
    assert claims(folder, tmp_path, "--machine", "a desk calculator", only=list(CLAIMS)) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["claims"]) == list(CLAIMS) and not result["failed"] and result == saved(tmp_path)
    assert {row["same_answers"] for row in result["claims"].values()} == {True, None}
    text = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert text == as_markdown(result) and "on a desk calculator." in text and "--quick" in result["command"]


def test_a_rerun_measures_only_what_is_missing(folder, tmp_path, experiment):
    runs = []
    for name in ("lpm", "fork", "batching"):
        experiment(name, lambda lab, name=name: runs.append(name) or two_sides(lab))
    claims(folder, tmp_path)
    claims(folder, tmp_path, only=["fork", "lpm"])
    assert runs == ["lpm", "fork"] and saved(tmp_path)["command"].count("--only fork lpm")
    claims(folder, tmp_path, "--fresh")
    assert runs == ["lpm", "fork", "lpm"] and list(saved(tmp_path)["claims"]) == ["lpm"]


DAMAGED_ROW = '{"claims": {"lpm": {"mechanism": "m"}}}'


@pytest.mark.parametrize("content", ["", "[]", "3", '{"claims": []}', '{"claims": {"lpm": 3}}', DAMAGED_ROW])
def test_what_cannot_be_continued_is_named_or_replaced(folder, tmp_path, capsys, experiment, content):
    experiment("lpm", two_sides)
    (tmp_path / "claims.json").write_text(content, encoding="utf-8")
    assert claims(folder, tmp_path) == 2
    assert "claims.json cannot be continued, it is no file of this command, or damaged" in capsys.readouterr().err
    assert claims(folder, tmp_path, "--fresh") == 0
    assert claims(folder, tmp_path, "--seed", "7") == 2
    assert (
        "it has other settings: engine seed 0 there, 7 now. Use" in capsys.readouterr().err
        and saved(tmp_path)["engine"]["seed"] != 7
    )


def test_failures_and_interruptions_lose_only_their_own_row(folder, tmp_path, capsys, experiment):
    def interrupted(lab):
        raise KeyboardInterrupt

    for name, run in {"kv-memory": broken, "lpm": two_sides, "fork": interrupted}.items():
        experiment(name, run)
    assert claims(folder, tmp_path, only=["kv-memory", "lpm", "fork"]) == 130
    assert "kv-memory: FAILED: OSError: no such thing" in capsys.readouterr().err
    assert list(saved(tmp_path)["claims"]) == ["lpm"] and "kv-memory failed: OSError" in as_markdown(saved(tmp_path))
    assert claims(folder, tmp_path, only=["kv-memory"]) == 1
    for name in ("kv-memory", "fork"):  # mended: the next run measures them
        experiment(name, two_sides)
    assert claims(folder, tmp_path, only=["kv-memory", "lpm", "fork"]) == 0
    result = saved(tmp_path)
    assert list(result["claims"]) == ["kv-memory", "fork", "lpm"] and not result["failed"]
    assert result["claims"]["fork"]["same_answers"] is False  # two_sides answers two things
    assert result["claims"]["fork"]["answers"].startswith("NOT the same")


def test_sides_with_other_keys_leave_cells_empty():
    sides = {"a": {"counted": {"n": 1}, "clock": {"s": [1.0, 3.0]}}, "b": {"counted": {"m": 2}, "clock": {}}}
    assert columns(sides) == [["", "n", "m", "s"], ["a", "1", "", "2 (1 to 3)"], ["b", "", "2", ""]]


def test_committed_results_are_of_these_claims():
    """results/claims.md was written from results/claims.json, row by row."""
    result = saved(ROOT / "results")
    assert list(result["claims"]) == list(CLAIMS) and not result["failed"]
    for name, paper in CLAIMS.items():
        row = result["claims"][name]
        assert all(row[key] == paper[key] for key in ("mechanism", "claim", "source", "setting", "why"))
        assert row["same_answers"] in (True, None)
    assert as_markdown(result) == (ROOT / "results" / "claims.md").read_text(encoding="utf-8")
    assert "(results/claims.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
