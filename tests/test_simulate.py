"""The simulator on small traces: it ends, it repeats, and its figures move the way the ideas say."""

import json

import pytest

from benchmarks import simulate
from scheduler import Scheduler


def run(*flags):
    simulation = simulate.Simulation(simulate.parse(["--simulate", "--requests", "300", "--check-every", "50", *flags]))
    simulation.run()
    report = simulation.report()
    assert report["requests"] == 300
    stats = simulation.scheduler.stats()
    assert stats["live"] == 0 and stats["free"] + stats["cached"] == stats["total"]
    return report


TIGHT = ["--num-blocks", "140", "--rate", "20", "--max-num-seqs", "16"]


def test_a_seed_fixes_the_simulation():
    first, second = run(*TIGHT), run(*TIGHT)
    first.pop("planning_us_per_step"), second.pop("planning_us_per_step")
    assert first == second and first["ttft_s"] != run(*TIGHT, "--seed", "1")["ttft_s"]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_pool_too_small_for_the_load_preempts_and_still_serves_all(policy, preemption):
    report = run(*TIGHT, "--policy", policy, "--preemption", preemption)
    assert report["preemptions"] > 0 and (report["recomputed_tokens"] == 0 or preemption == "recompute")
    assert report["ttft_s"]["p99"] >= report["ttft_s"]["p50"] > 0


def test_pages_hold_more_real_tokens_than_slabs():
    paged = run(*TIGHT, "--prefix-cache", "none")
    slabs = run(*TIGHT, "--prefix-cache", "none", "--reserve", "contiguous")
    assert slabs["kv_share_of_live"] < 0.7 < 0.9 < paged["kv_share_of_live"]
    assert slabs["simulated_s"] > paged["simulated_s"]


def test_continuous_batching_outruns_static():
    assert run(*TIGHT)["output_tok_s"] > run(*TIGHT, "--batching", "static")["output_tok_s"]


def test_a_cache_saves_work_where_prefixes_are_shared_and_nothing_elsewhere():
    shared = ["--prefix-share", "1", "--prefixes", "3"]
    for cache in ("radix", "hash"):
        assert run(*TIGHT, *shared, "--prefix-cache", cache)["hit_rate"] > 0.4
    assert run(*TIGHT, *shared, "--prefix-cache", "none")["hit_rate"] == 0
    assert run(*TIGHT, "--prefixes", "0", "--turns", "1")["hit_rate"] == 0


def test_books_that_do_not_balance_are_noticed():
    simulation = simulate.Simulation(simulate.parse(["--simulate", "--requests", "5"]))
    simulate.check_books(simulation.scheduler)
    simulation.scheduler.pool.allocate(1)  # a block that nobody owns
    with pytest.raises(RuntimeError, match="do not balance"):
        simulate.check_books(simulation.scheduler)


def test_the_command_line(capsys):
    simulate.main(["--simulate", "--requests", "20", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert {"queueing_s", "ttft_s", "tpot_s", "hit_rate", "preemptions", "kv_share_of_live"} <= set(report)
    simulate.main(["--simulate", "--requests", "3", "--trace"])
    assert "prefill" in capsys.readouterr().out
    assert simulate.main(["--simulate", "--num-blocks", "4"]) == 2
    assert "the whole pool holds 48" in capsys.readouterr().err
    simulate.main(["--simulate", "--requests", "3", "--trace", "--json"])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["requests"] == 3 and "prefill" in printed.err


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize("flag", ["rate", "prompt-mean", "length-spread", "prefix-share", "think-time", "step-cost"])
def test_a_workload_that_means_nothing_is_refused(flag, value, capsys):
    for text in (value, "1e-320") if flag == "rate" else (value,):
        with pytest.raises(SystemExit):
            simulate.parse(["--simulate", f"--{flag}", text])
        assert f"--{flag} {float(text)}: must be from" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--cost", "--policy", "lpm", "--requests", "10"], "--policy, --requests would change nothing here: --cost"),
        (["--cost", "--trace"], "--trace"),
        (["--simulate", "--prefixes", "0", "--prefix-len", "9"], "--prefix-len would change nothing here: no prefixes"),
        (["--simulate", "--turns", "1", "--think-time", "1"], "--think-time"),
        (["--simulate", "--swap-cost", "1"], "add --preemption swap"),
    ],
)
def test_flags_without_effect_are_refused(flags, named, capsys, monkeypatch):
    monkeypatch.setattr(simulate, "print_planning_cost", lambda as_json: pytest.fail("it was measured"))
    assert simulate.main(flags) == 2
    assert named in capsys.readouterr().err


def test_planning_cost_is_measured_on_the_real_scheduler(monkeypatch):
    planned = []
    schedule = Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda self: planned.append(1) or schedule(self))
    assert simulate.planning_cost(10, "lpm", steps=5) > 0
    assert len(planned) >= 5
