"""Each mechanism's effect has the right sign in counted work, on a tiny random model; no test here reads a clock."""

import json
import re
from dataclasses import replace
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
from benchmarks import speed as bench_speed
from benchmarks.claims import CLAIMS, Claim, as_markdown, columns, measure
from benchmarks.lab import Lab, Run, Sizes, answer_of, gathered, lognormal_lengths, run_all
from compiled import CompiledRunner
from drafting.budget import StepCost

ROOT = Path(bench_claims.__file__).parent.parent
SMALL = Sizes(
    rounds=2, trace_requests=60, batch_requests=10, seats=4, answer_mean=10, shared=64, questions=3, conversations=1,
    turns=3, turn=32, branches=2, unshared=40, long_prompt=200, budgets=(32, 64), preempt_requests=4, preempt_answer=48,
    lpm_requests=60, batches=(1, 3), decoded=6, text=60, guessed=24, records=2,
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
        patch.setattr(
            generate, "CompiledRunner", partial(CompiledRunner, backend="eager")
        )  # counts graphs, compiles none
        costs = StepCost({1: 1.0, 2: 1.01, 256: 2.0})  # not measured: how much is guessed depends on them
        patch.setattr(StepCost, "measure", lambda *args: costs)
        same = {"temperature": 0.0, "logit_bias": {5: 100}}  # the one text that a random model repeats
        patch.setitem(bench_guessing.TEXTS, "loop", (bench_guessing.story, same))
        once = Lab(lab.flags, replace(SMALL, rounds=1))
        return {name: measure(once if name == "mmap" else lab, name) for name in CLAIMS}


def counted(rows, name):
    return {side: found["counted"] for side, found in rows[name]["sides"].items()}


def test_no_switch_changes_an_answer(rows):
    same = {name: row["same_answers"] for name, row in rows.items()}
    assert same == {name: None if claim.alone else True for name, claim in CLAIMS.items()}
    for name, claim in CLAIMS.items():
        assert rows[name]["answers"].startswith(claim.alone or "the same on all sides")


def test_pages_hold_a_larger_share_of_tokens_and_take_fewer_steps(rows):
    slab, pages, ideal = counted(rows, "kv-memory").values()
    assert slab["held slots with a token"] < 0.6 < 0.95 < pages["held slots with a token"] <= 1
    assert ideal["held slots with a token"] == 1 and ideal["steps"] <= pages["steps"]
    assert pages["steps"] < slab["steps"] and pages["tokens a step"] > slab["tokens a step"]


def test_continuous_batching_takes_fewer_steps_over_the_same_tokens(rows):
    static, continuous = counted(rows, "batching").values()
    assert continuous["steps"] < static["steps"]
    assert continuous["tokens computed"] == static["tokens computed"]


def test_forks_hold_the_prompt_once_and_compute_it_once(rows):
    apart, forks = counted(rows, "fork").values()
    assert apart["most blocks held"] == 4 * (4 + 2) and forks["most blocks held"] == 4 + 4 * 2
    assert apart["blocks copied"] == 0 and forks["blocks copied"] == 3  # the last owner writes in place
    assert apart["tokens computed"] - forks["tokens computed"] == 3 * (SMALL.shared + 8)


def test_a_flat_run_computes_no_padding(rows, lab):
    rectangle, flat = counted(rows, "selective-batching").values()
    lengths = lognormal_lengths(SMALL.seats, SMALL.unshared / 4, SMALL.unshared, lab.seed)
    assert flat["tokens computed"] == sum(lengths) < rectangle["tokens computed"] == len(lengths) * max(lengths)


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


def test_chunks_bound_the_step_that_others_wait_for(rows):
    sides = counted(rows, "chunked-prefill")
    assert sides["whole"]["largest step"] > SMALL.long_prompt
    assert sides["chunks of 64"]["largest step"] == 64 and sides["chunks of 32"]["largest step"] == 32
    meanwhile = [sides[name]["tokens meanwhile"] for name in ("whole", "chunks of 64", "chunks of 32")]
    assert meanwhile == sorted(meanwhile) and len(set(meanwhile)) == 3
    assert len({side["tokens computed"] for side in sides.values()}) == 1


def test_swapping_computes_nothing_twice(rows):
    again, swap = counted(rows, "preemption").values()
    assert again["preemptions"] > 0 and swap["preemptions"] > 0
    assert again["swaps"] == 0 < swap["swaps"]
    assert swap["recomputed tokens"] == 0 < again["recomputed tokens"]
    assert again["tokens computed"] == swap["tokens computed"] + again["recomputed tokens"]


def test_longest_prefix_first_hits_more_and_computes_less(rows):
    fcfs, lpm = counted(rows, "lpm").values()
    assert lpm["hit rate"] > fcfs["hit rate"]
    assert lpm["tokens computed"] < fcfs["tokens computed"] and lpm["evicted blocks"] < fcfs["evicted blocks"]


def test_fewer_bits_are_fewer_bytes_and_hardly_any_surprise(rows):
    sides = counted(rows, "quantisation")
    read = [side["MB a step"] for side in sides.values()]
    assert list(sides) == ["float32", "bfloat16", "int8", "int4"] and read == sorted(read, reverse=True)
    assert read[1] == pytest.approx(read[0] / 2, rel=0.02) and read[2] < read[1]
    assert sides["int8"]["perplexity"] == pytest.approx(sides["float32"]["perplexity"], rel=0.1)


def test_blocks_take_the_bits_that_their_format_has(rows):
    sides = counted(rows, "gguf")
    assert {name: side["bits a weight"] for name, side in sides.items()} == {
        "Q8_0": 8.5, "Q6_K": 6.5625, "Q5_K": 5.5, "Q4_K": 4.5, "Q3_K": 3.4375, "Q2_K": 2.625,
        "Q4_0": 4.5, "Q4_1": 5.0, "Q5_0": 5.5, "Q5_1": 6.0,
    }  # fmt: skip
    assert all(side["codes"] < side["bits a weight"] for side in sides.values())


def test_compiled_steps_need_fewer_calls_and_two_graphs(rows):
    calls, tape, dense_calls, dense = counted(rows, "compile").values()
    assert tape["Python calls a step"] < calls["Python calls a step"] / 5
    assert calls["steps captured"] == 0 < tape["steps captured"]
    assert dense_calls["graphs compiled"] == 0 and dense["graphs compiled"] == 2
    assert rows["compile"]["answers"] == "the same on all sides; float32: rounding differs"


def test_fused_kernels_write_less_in_fewer_operations(rows):
    reference, native = counted(rows, "kernels").values()
    assert native["operations a step"] < reference["operations a step"] / 5
    assert native["MB of results a step"] < reference["MB of results a step"] / 5
    assert native["MB of weights a step"] == reference["MB of weights a step"]


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
            off, ngram, first = (sides[f"{text} x{n}, {name}"] for name in ("off", "ngram", "self:1"))
            assert off["guesses"] == 0 and max(ngram["steps"], first["steps"]) <= off["steps"]
            assert ngram["accepted"] <= ngram["guesses"] and ngram["tokens a step"] >= 1
            if n == 1:
                assert ngram["steps"] == off["steps"] - ngram["accepted"]
    assert sides["loop x1, ngram"]["steps"] < sides["loop x1, off"]["steps"] / 2


def test_jumps_draw_less_and_nothing_is_invalid(rows):
    sides = counted(rows, "structured")
    free, mask, jumps = (sides[name] for name in ("free", "mask", "mask and jumps"))
    assert free["valid"] < 1 and mask["valid"] == jumps["valid"] == 1
    assert mask["forced"] == 0 < jumps["forced"] and mask["drawn"] == mask["tokens"]
    assert jumps["drawn"] < mask["drawn"] and jumps["steps"] < mask["steps"]
    assert all(1 < sides[f"grammar of {name}"]["masks"] <= 24 for name in bench_guessing.SCHEMAS)


@pytest.mark.parametrize(
    "text, valid",
    [
        ('{"full_name": "A", "place_of_birth": "B", "year_of_birth": 1900} and more', True),
        ('{"full_name": "A", "place_of_birth": "B", "year_of_birth": 900}', False),
        ('{"full_name": "A", "place_of_birth": "B", "year_of_birth": true}', False),
        ('{"full_name": "A", "place_of_birth": "B"}', False),
        ("[1]", False),
        ('{"full_name": "A', False),
    ],
)
def test_validity_of_a_record(text, valid):
    assert bench_guessing.is_person(text) is valid


def test_every_side_ran_every_round_and_every_row_has_all_its_fields(rows):
    for name, row in rows.items():
        rounds = 1 if name == "mmap" else SMALL.rounds  # its processes take seconds to start
        for key in ("mechanism", "claim", "source", "setting", "measured", "floor", "why", "answers"):
            assert row[key] and isinstance(row[key], str), (row["mechanism"], key)
        assert re.search(r"\d", row["floor"]), f"a floor is a figure: {row['floor']}"
        for side in row["sides"].values():
            assert side["counted"] and all(len(values) == rounds for values in side["clock"].values())


@pytest.mark.parametrize("container", ["folder", "gguf"])
def test_a_start_from_a_file_read_whole_makes_the_same_model(container, folder, tmp_path):
    path = folder if container == "folder" else str(tiny.gguf_file(folder, tmp_path / "m.gguf", "Q8_0"))
    mapped, whole = (bench_speed.start_of(path, "int8", read) for read in (False, True))
    assert mapped["model"] == whole["model"] > 0 and min(mapped["ready s"], whole["ready s"]) > 0


def test_sides_are_run_in_turn():
    order = []

    def side(name):
        order.append(name)
        return Run({"n": 1})

    Lab({}, Sizes(rounds=3)).alternate(side, ["a", "b"])
    assert "".join(order) == "ababab"


def test_rounds_that_did_different_work_are_no_measurement():
    with pytest.raises(RuntimeError, match="x: two rounds did not do the same work"):
        gathered("x", [Run({"steps": 1}), Run({"steps": 2})])
    with pytest.raises(RuntimeError, match="same work"):
        gathered("x", [Run({}, answers=[[1]]), Run({}, answers=[[2]])])


def two_sides(lab):
    return lab.alternate(lambda i: Run({"n": 1}, answers=[[i]]), {"a": 1, "b": 2}), "measured", "1x"


def broken(lab):
    raise OSError("no such thing")


@pytest.fixture
def claim(monkeypatch):
    """Put an experiment in the place of a row."""
    return lambda name, run: monkeypatch.setitem(CLAIMS, name, Claim(run, "m", "c", "s", "on t", "w"))


def test_a_side_that_answers_otherwise_is_reported(claim, lab):
    claim("odd", two_sides)
    row = measure(lab, "odd")
    assert row["same_answers"] is False and row["answers"].startswith("NOT the same")


def test_engines_of_a_row_are_let_go_and_the_process_is_turned_back(lab):
    own = lab.llm, kernels.backend()
    lab.open(kernels="reference")
    assert kernels.backend() == "reference" and len(lab._process) == 2
    lab.close()
    assert (lab.llm, kernels.backend()) == own and len(lab._process) == 1


def test_a_failed_request_is_an_error_not_a_fast_answer(lab, monkeypatch):
    scheduler = lab.scheduler()
    with monkeypatch.context() as patch:
        patch.setattr(lab.llm.runner, "run", broken)
        request = lab.llm.add([1, 2, 3], answer_of(2))
        with pytest.raises(ValueError, match="no such thing"):
            run_all(lab.llm, [request])
    assert scheduler.stats()["live"] == 0


def test_a_pool_too_small_for_the_experiment_is_named(lab):
    with pytest.raises(ValueError, match="needs 5000 KV blocks, the pool has 400: raise --num-blocks"):
        lab.scheduler(num_blocks=5000)


@pytest.mark.parametrize(
    ("flags", "cause"),
    [(["--policy", "fcfs"], "--policy would change nothing"), (["--overlap"], "--overlap would change nothing")]
    + [(["--fresh"], "it measures again"), (["--out", __file__], "File exists")],
)
def test_what_makes_no_sense_is_refused_before_anything_is_loaded(flags, cause, capsys):
    assert bench.main(["claims", "--only", "lpm", "--quick", "--model", "never loaded", *flags]) == 2
    assert cause in capsys.readouterr().err


def claims(folder, out, *flags, only=("lpm",)) -> int:
    command = ["claims", "--model", folder, "--quick", "--json", "--out", str(out), "--threads", "1"]
    return bench.main([*command, "--only", *only, *flags])


def saved(out) -> dict:
    return json.loads((out / "claims.json").read_text(encoding="utf-8"))


def test_the_whole_command_runs_quick_on_a_tiny_model(folder, tmp_path, capsys):
    names = [name for name in CLAIMS if name != "mmap"]  # whose processes take seconds
    assert claims(folder, tmp_path, "--machine", "a desk calculator", only=names) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["claims"]) == names and not result["failed"] and result == saved(tmp_path)
    assert {row["same_answers"] for row in result["claims"].values()} == {True, None}
    text = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert text == as_markdown(result) and "on a desk calculator." in text and "--quick" in result["command"]


def test_a_rerun_measures_only_what_is_missing(folder, tmp_path, claim):
    runs = []
    for name in ("lpm", "fork", "batching"):
        claim(name, lambda lab, name=name: runs.append(name) or two_sides(lab))
    claims(folder, tmp_path)
    claims(folder, tmp_path, only=["fork", "lpm"])
    assert runs == ["lpm", "fork"] and saved(tmp_path)["command"].count("--only fork lpm")
    claims(folder, tmp_path, "--fresh")
    assert runs == ["lpm", "fork", "lpm"] and list(saved(tmp_path)["claims"]) == ["lpm"]


DAMAGED_ROW = '{"claims": {"lpm": {"mechanism": "m"}}}'


@pytest.mark.parametrize("content", ["", "[]", "3", '{"claims": []}', '{"claims": {"lpm": 3}}', DAMAGED_ROW])
def test_what_cannot_be_continued_is_named_or_replaced(folder, tmp_path, capsys, claim, content):
    claim("lpm", two_sides)
    (tmp_path / "claims.json").write_text(content, encoding="utf-8")
    assert claims(folder, tmp_path) == 2
    assert "claims.json cannot be continued, it is no file of this command, or damaged" in capsys.readouterr().err
    assert claims(folder, tmp_path, "--fresh") == 0
    assert claims(folder, tmp_path, "--seed", "7") == 2
    assert "it has other settings: engine" in capsys.readouterr().err
    assert "seed" not in str(saved(tmp_path)["engine"]) or saved(tmp_path)["engine"]["seed"] != 7


def test_a_broken_row_is_reported_and_the_others_go_on(folder, tmp_path, capsys, claim):
    claim("kv-memory", broken)
    claim("lpm", two_sides)
    assert claims(folder, tmp_path, only=["kv-memory", "lpm"]) == 1
    assert "kv-memory: FAILED: OSError: no such thing" in capsys.readouterr().err
    result = saved(tmp_path)
    assert list(result["claims"]) == ["lpm"] and "kv-memory failed: OSError" in as_markdown(result)
    claim("kv-memory", two_sides)  # mended: the next run measures it
    assert claims(folder, tmp_path, only=["kv-memory", "lpm"]) == 0 and saved(tmp_path)["failed"] == {}


def test_an_interruption_loses_only_the_running_row(folder, tmp_path, claim):
    def interrupted(lab):
        raise KeyboardInterrupt

    claim("kv-memory", two_sides)
    claim("lpm", interrupted)
    assert claims(folder, tmp_path, only=["kv-memory", "lpm"]) == 130
    assert list(saved(tmp_path)["claims"]) == ["kv-memory"]


def test_sides_with_other_keys_leave_cells_empty():
    sides = {"a": {"counted": {"n": 1}, "clock": {"s": [1.0, 3.0]}}, "b": {"counted": {"m": 2}, "clock": {}}}
    assert columns(sides) == [["", "n", "m", "s"], ["a", "1", "", "2 (1 to 3)"], ["b", "", "2", ""]]


def test_committed_results_are_of_these_claims():
    """results/claims.md was written from results/claims.json, row by row."""
    result = saved(ROOT / "results")
    assert list(result["claims"]) == list(CLAIMS) and not result["failed"]
    for name, claim in CLAIMS.items():
        row = result["claims"][name]
        for key in ("mechanism", "claim", "source", "setting", "why"):
            assert row[key] == getattr(claim, key)
        assert row["same_answers"] in (True, None)
    assert as_markdown(result) == (ROOT / "results" / "claims.md").read_text(encoding="utf-8")
    assert "(results/claims.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
