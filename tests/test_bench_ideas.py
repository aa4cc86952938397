"""Each idea's effect has the right sign in counted work, on a tiny random model; no test here reads a clock."""

import json
from pathlib import Path

import pytest
import tiny

import bench
import bench_ideas
from bench_lab import Lab, Run, Sizes, answer_of, as_markdown, as_text, gathered, run_all
from generate import LLM

SMALL = Sizes(
    rounds=2,
    trace_requests=60,
    batch_requests=10,
    seats=4,
    answer_mean=10,
    shared=64,
    questions=3,
    conversations=1,
    turns=3,
    turn=32,
    branches=2,
    unshared=40,
    long_prompt=200,
    budgets=(32, 64),
    preempt_requests=4,
    preempt_answer=48,
    lpm_requests=60,
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    folder = tiny.hf_folder(tmp_path_factory.mktemp("bench") / "m", "llama")
    return Lab(lambda: LLM(model=str(folder), threads=1, num_blocks=400), SMALL)


@pytest.fixture(scope="module")
def rows(lab):
    return bench_ideas.measure(lab, list(bench_ideas.IDEAS))


def counted(rows, name):
    return {side: found["counted"] for side, found in rows[name]["sides"].items()}


def test_no_switch_changes_an_answer(rows):
    same = {name: row["same_answers"] for name, row in rows.items()}
    assert same == dict.fromkeys(rows, True) | {"kv-memory": None, "lpm": None}


def test_pages_hold_a_larger_share_of_tokens_and_take_fewer_steps(rows):
    slab, pages = counted(rows, "kv-memory").values()
    assert slab["held slots with a token"] < 0.6 < 0.95 < pages["held slots with a token"] <= 1
    assert pages["steps"] < slab["steps"] and pages["tokens a step"] > slab["tokens a step"]


def test_continuous_batching_takes_fewer_steps_over_the_same_tokens(rows):
    static, continuous = counted(rows, "batching").values()
    assert continuous["steps"] < static["steps"]
    assert continuous["tokens computed"] == static["tokens computed"]


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_prefix_caches_save_exactly_the_tokens_they_find(rows, cache):
    sides = counted(rows, "prefix-cache")
    for workload in bench_ideas.WORKLOADS:
        none, cached = sides[f"{workload}, none"], sides[f"{workload}, {cache}"]
        assert none["cached tokens"] == 0 and none["prompt tokens"] == cached["prompt tokens"]
        assert cached["tokens computed"] == none["tokens computed"] - cached["cached tokens"]
        assert (cached["cached tokens"] > 0.3 * none["prompt tokens"]) == (workload != "no reuse")
    assert sides[f"no reuse, {cache}"]["cached tokens"] == 0


def test_both_caches_find_the_same_prefixes(rows):
    sides = counted(rows, "prefix-cache")
    assert all(sides[f"{w}, hash"] == sides[f"{w}, radix"] for w in bench_ideas.WORKLOADS)


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


def test_every_side_ran_every_round_and_every_row_says_why(rows):
    for row in rows.values():
        assert row["claim"] and row["source"] and row["measured"] and row["why"]
        for side in row["sides"].values():
            assert side["counted"] and all(len(values) == SMALL.rounds for values in side["clock"].values())


def test_sides_are_run_in_turn():
    order = []

    def side(name):
        return lambda: order.append(name) or Run({"n": 1})

    Lab(None, Sizes(rounds=3)).alternate({"a": side("a"), "b": side("b")})
    assert "".join(order) == "ababab"


def test_rounds_that_did_different_work_are_no_measurement():
    with pytest.raises(RuntimeError, match="x: two rounds did not do the same work"):
        gathered("x", [Run({"steps": 1}), Run({"steps": 2})])
    with pytest.raises(RuntimeError, match="same work"):
        gathered("x", [Run({}, answers=[[1]]), Run({}, answers=[[2]])])


def test_a_side_that_answers_otherwise_is_reported(monkeypatch, lab):
    def idea(lab):
        sides = {"a": lambda: Run({"n": 1}, answers=[[1]]), "b": lambda: Run({"n": 1}, answers=[[2]])}
        return lab.alternate(sides), "measured"

    monkeypatch.setitem(bench_ideas.IDEAS, "odd", bench_ideas.Idea(idea, "m", "c", "s", "w"))
    rows = bench_ideas.measure(lab, ["odd"])
    assert rows["odd"]["same_answers"] is False
    assert "NOT the same" in as_text(rows)


def test_a_failed_request_is_an_error_not_a_fast_answer(lab, monkeypatch):
    scheduler = lab.scheduler()

    def broken(batch):
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as patch:
        patch.setattr(lab.llm.engine, "run_model", broken)
        request = lab.llm.add([1, 2, 3], answer_of(2))
        with pytest.raises(ValueError, match="no such kernel"):
            run_all(lab.llm, [request])
    assert scheduler.stats()["live"] == 0


def test_a_pool_too_small_for_the_experiment_is_named(lab):
    with pytest.raises(ValueError, match="needs 5000 KV blocks, the pool has 400: raise --num-blocks"):
        lab.scheduler(num_blocks=5000)


@pytest.mark.parametrize(
    "flags", [["--policy", "lpm"], ["--no-chunked"], ["--max-num-seqs", "4"], ["--speculate", "ngram"]]
)
def test_switches_the_experiments_flip_are_refused(flags, capsys):
    assert bench.main(["ideas", "--only", "lpm", "--quick", *flags]) == 2
    assert f"{flags[0].replace('no-', '')} " in capsys.readouterr().err


def test_the_command_writes_both_files(tmp_path, capsys):
    command = ["ideas", "--only", "lpm", "--quick", "--json", "--out", str(tmp_path), "--machine", "a desk calculator"]
    assert bench.main(command) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "ideas.json").read_text(encoding="utf-8"))
    text = (tmp_path / "ideas.md").read_text(encoding="utf-8")
    assert "a desk calculator" in text and "--only lpm --quick" in text and list(printed["ideas"]) == ["lpm"]


def test_committed_results_are_of_these_ideas():
    """results/ was written by this command: the same rows, and the Markdown is what the JSON says."""
    folder = Path(bench_ideas.__file__).parent / "results"
    result = json.loads((folder / "ideas.json").read_text(encoding="utf-8"))
    assert list(result["ideas"]) == list(bench_ideas.IDEAS)
    for name, idea in bench_ideas.IDEAS.items():
        row = result["ideas"][name]
        assert [row["mechanism"], row["claim"], row["source"], row["why"]] == [
            idea.mechanism, idea.claim, idea.source, idea.why,
        ]  # fmt: skip
        assert row["same_answers"] in (True, None)
    assert as_markdown(result) == (folder / "ideas.md").read_text(encoding="utf-8")
