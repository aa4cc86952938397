"""The simulator on small traces: it ends, it repeats, and its figures move the way the ideas say."""

import json
from collections import Counter

import pytest

from benchmarks import simulate
from scheduler import Scheduler


class Audited(simulate.Simulation):
    def step(self):
        super().step()
        if self.scheduler.steps % 50 == 0:
            check_books(self.scheduler)


def check_books(scheduler: Scheduler) -> None:
    """Reference counts recomputed from scratch: every owner of a block is a running sequence or the prefix cache."""
    owners = Counter(block for seq in scheduler.running for block in seq.block_table)
    stats, in_use = scheduler.stats(), len(owners)
    stack = list(scheduler.cache.roots.values()) if scheduler.cache else []
    while stack:
        node = stack.pop()
        stack += node.children.values()
        owners.update(node.blocks)
    assert stats["live"] == in_use and stats["free"] + stats["cached"] + stats["live"] == stats["total"]
    assert all(owners[block] == n for block, n in enumerate(scheduler.pool.refs) if block)


def run(*flags):
    simulation = Audited(simulate.parse(["--simulate", "--requests", "300", *flags]))
    simulation.run()
    check_books(simulation.scheduler)
    report = simulation.report()
    assert report["requests"] == 300 and simulation.scheduler.stats()["live"] == 0
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


def test_what_never_happened_has_no_figure(capsys):
    report = run("--max-tokens", "1")
    assert set(report["tpot_s"].values()) == {None} and report["ttft_s"]["p50"] > 0
    assert simulate.main(["--requests", "1", "--max-tokens", "1"]) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["tpot_s"] == "mean -  p50 -  p95 -  p99 -  max -" and shown["kv_share_of_pool"] == "-"


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
    monkeypatch.setattr(simulate, "planning_cost", lambda *_: pytest.fail("it was measured"))
    assert simulate.main(flags) == 2
    assert named in capsys.readouterr().err


def test_planning_cost_is_measured_on_the_real_scheduler(monkeypatch):
    planned = []
    schedule = Scheduler.schedule
    monkeypatch.setattr(Scheduler, "schedule", lambda self: planned.append(1) or schedule(self))
    assert simulate.planning_cost(10, "lpm", steps=5) > 0
    assert len(planned) >= 5
