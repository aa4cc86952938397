"""The scheduler's promises one by one, and the field cases that are about scheduling."""

import pytest
from fake_engine import FakeEngine, alone

import policies
from kv_paged import BlockPool
from radix import PREFIX_CACHES
from scheduler import RequestTooLong, Scheduler, Sequence


def ids(entries):
    return [(seq.id, n) for seq, n in entries]


def scheduler_of(num_blocks=33, block_size=4, cache=None, **options):
    pool = BlockPool(num_blocks, block_size)
    return Scheduler(pool, PREFIX_CACHES[cache](pool) if cache else None, **options)


def run_step(scheduler, token=0):
    """Plan, compute and give every sequence that was caught up one more token."""
    step = scheduler.schedule()
    scheduler.computed(step)
    for seq, _ in step.entries:
        if seq.num_new == 0:
            seq.tokens.append(token)
    return step


# ---- what is refused, and with which numbers


@pytest.mark.parametrize("length", [64, 65, 1000])
def test_F26_a_prompt_that_fills_the_context_is_refused(length):
    scheduler = scheduler_of(max_model_len=64)
    with pytest.raises(RequestTooLong, match=f"prompt of {length} tokens .* max_model_len=64; at most 63 fit"):
        scheduler.add(Sequence([1] * length, 1))
    assert not scheduler.has_unfinished()


@pytest.mark.parametrize("max_tokens", [1, 10_000])
def test_F26_63_tokens_and_one_fit_a_context_of_64(max_tokens):
    engine = FakeEngine(17, 4, max_model_len=64)
    seq = engine.add([1] * 63, max_tokens)
    engine.run()
    assert len(seq.tokens) == 64 and seq.tokens == alone([1] * 63, None, 0, 64)


def test_the_last_token_needs_no_slot():
    engine = FakeEngine(4, 4, max_model_len=64)  # 12 slots
    engine.add([1] * 8, 5)
    engine.run()
    with pytest.raises(RequestTooLong, match="prompt of 8 tokens with max_tokens=6 needs KV memory for 13 .* holds 12"):
        engine.scheduler.add(Sequence([1] * 8, 6))


def test_nonsense_is_refused_before_anything_happens():
    scheduler = scheduler_of()
    scheduler.add(Sequence([1], 1, id="a"))
    for seq, message in (
        (Sequence([1], 1, id="a"), "'a' is already in use"),
        (Sequence([], 1), "at least one token"),
        (Sequence([1], 0), "max_tokens=0: must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            scheduler.add(seq)
    assert list(scheduler.sequences) == ["a"]
    with pytest.raises(ValueError, match="is not in the scheduler"):
        scheduler.fork(Sequence([1], 1))
    with pytest.raises(ValueError, match="'a' is already in use"):
        scheduler.fork(scheduler.sequences["a"], id="a")
    with pytest.raises(ValueError, match="cannot keep 0 of 1 tokens"):
        scheduler.truncate(scheduler.sequences["a"], 0)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"policy": "lifo"}, "policy='lifo': must be one of fcfs, priority, lpm"),
        ({"preemption": "kill"}, "preemption='kill': must be one of recompute, swap"),
        ({"batching": "none"}, "batching='none': must be one of continuous, static"),
        ({"reserve": "all"}, "reserve='all': must be one of paged, contiguous"),
        ({"max_num_seqs": 0}, "max_num_seqs=0: must be at least 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens=0"),
        ({"max_model_len": 1}, "max_model_len=1: must be at least 2"),
        ({"watermark": 1}, "watermark=1: must be a share"),
        ({"chunked": False, "max_num_batched_tokens": 8, "max_model_len": 9}, "must reach max_model_len=9"),
        ({"reserve": "contiguous", "cache": "radix"}, "turn the prefix cache off"),
    ],
)
def test_switches_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        scheduler_of(**options)


# ---- leaving


@pytest.mark.parametrize("cache", [None, "radix", "hash"])
@pytest.mark.parametrize("moment", ["waiting", "mid-prefill", "decoding", "preempted", "swapped", "forked"])
def test_F29_an_abort_returns_every_block_at_once(moment, cache):
    engine = FakeEngine(
        9, 4, cache, max_num_seqs=2, max_num_batched_tokens=6, preemption="swap" if moment == "swapped" else "recompute"
    )
    scheduler = engine.scheduler
    first, second = engine.add([0] * 14, 18), engine.add([1] * 10, 20)
    third = engine.add([2] * 3, 4)
    victim = {"waiting": third, "mid-prefill": first, "decoding": first}.get(moment, second)
    if moment == "forked":
        while second.num_computed < 10:
            engine.step()
        engine.end(third, scheduler.abort)
        engine.end(first, scheduler.abort)
        child = engine.fork(second, salt=3)
        assert child.state == "running" and child.block_table == second.block_table
        engine.step()
    elif moment in ("preempted", "swapped"):
        while not second.preemptions:
            engine.step()
        assert second.state == ("swapped" if moment == "swapped" else "waiting") and not second.block_table
    else:
        for _ in range(1 if moment == "mid-prefill" else 4):
            engine.step()
        assert victim.num_computed == {"waiting": 0, "mid-prefill": 6}.get(moment, victim.num_computed)
    engine.end(victim, scheduler.abort)
    engine.check()
    assert victim.state == "finished" and not victim.block_table and victim.host is None
    engine.run()
    engine.check_empty()


def test_F30_an_abort_after_the_end_does_nothing():
    engine = FakeEngine(9, 4, max_num_batched_tokens=16)
    seq, other = engine.add([1] * 5, 3), engine.add([2] * 5, 9)
    while seq not in engine.done:
        engine.step()
    before = engine.scheduler.stats()
    for target in (seq, seq.id, seq, "never heard of", other.id + 10**6):
        engine.scheduler.abort(target)
    engine.scheduler.finish(seq)
    assert engine.scheduler.stats() == before
    again = engine.add([1] * 5, 3, id=seq.id)  # the id is free again, and the old object no longer stands for it
    engine.scheduler.abort(seq)
    assert again.state == "waiting"
    engine.run()
    engine.check_empty()


def test_a_step_that_raises_ends_its_own_sequences_only():
    engine = FakeEngine(12, 4, "radix", max_num_seqs=2, max_num_batched_tokens=8)
    engine.add([1] * 6, 3), engine.add([2] * 6, 3)
    bystander = engine.add([3] * 6, 3)
    failed = [seq for seq, _ in engine.step(fails=True).entries]
    assert len(failed) == 2 and all(seq.state == "finished" for seq in failed)
    assert engine.cache.num_blocks == 0, "what a broken step wrote must not be cached"
    engine.run()
    assert engine.done == [bystander]
    engine.check_empty()


# ---- preemption


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_F33_a_preempted_sequence_keeps_its_tokens_and_its_prompt_length(preemption):
    engine = FakeEngine(9, 2, None, max_num_batched_tokens=16, preemption=preemption)
    first, second = engine.add([0, 1, 2, 0], 12), engine.add([1, 1, 1], 12)
    while not second.preemptions:
        before = list(second.tokens), second.num_computed
        engine.step()
    assert second.tokens == before[0] and second.num_prompt == 3
    assert second.num_computed == (before[1] if preemption == "swap" else 0)
    assert first.preemptions == 0 and engine.scheduler.stats()["preemptions"] == 1
    assert engine.scheduler.stats()["swaps"] == (preemption == "swap")
    engine.run()
    assert len(second.tokens) == 15 and [len(seq.tokens) for seq in engine.done] == [16, 15]


def test_the_youngest_leaves_first_and_returns_first():
    scheduler = scheduler_of(num_blocks=8, block_size=4, max_num_batched_tokens=32, watermark=0)
    for name in "abc":
        scheduler.add(Sequence([1] * 7, 20, id=name))
    scheduler.add(Sequence([1] * 3, 4, id="d"))
    assert ids(run_step(scheduler).entries) == [("a", 7), ("b", 7), ("c", 7), ("d", 3)]
    assert ids(run_step(scheduler).entries) == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]
    step = run_step(scheduler)
    assert [seq.id for seq in step.preempted] == ["d", "c"] and ids(step.entries) == [("a", 1), ("b", 1)]
    assert "preempt d (recompute)" in step.describe() and scheduler.stats()["free"] == 1
    scheduler.add(Sequence([1], 1, id="e", arrival=-1.0))  # "older" than all, but c and d have run before
    assert [seq.id for seq in scheduler.waiting.window(3)] == ["c", "d", "e"]
    scheduler.finish(scheduler.sequences["a"])
    assert ids(run_step(scheduler).entries) == [
        ("b", 1),
        ("c", 9),
    ]  # d needs two blocks, one is free: e waits behind it
    scheduler.finish(scheduler.sequences["b"])
    assert ids(run_step(scheduler).entries) == [("c", 1), ("d", 5), ("e", 1)]


def test_by_priority_the_least_important_leaves():
    scheduler = scheduler_of(num_blocks=7, block_size=4, max_num_batched_tokens=32, policy="priority", watermark=0)
    for name, priority in (("low", 9), ("high", 0), ("middle", 5)):
        scheduler.add(Sequence([1] * 8, 16, id=name, priority=priority))
    assert ids(run_step(scheduler).entries) == [("high", 8), ("middle", 8), ("low", 8)]
    step = run_step(scheduler)
    assert [seq.id for seq in step.preempted] == ["low"] and ids(step.entries) == [("high", 1), ("middle", 1)]


def test_nobody_makes_a_better_ranked_sequence_leave():
    scheduler = scheduler_of(num_blocks=7, block_size=4, max_num_batched_tokens=8, watermark=0)
    scheduler.add(Sequence([1] * 7, 9, id="young", arrival=2.0))
    run_step(scheduler)
    scheduler.add(Sequence([1] * 16, 8, id="old", arrival=1.0))
    assert ids(run_step(scheduler).entries) == [("young", 1), ("old", 7)]
    assert ids(run_step(scheduler).entries) == [("young", 1), ("old", 5)]  # 3 + 3 blocks: the pool is full
    for _ in range(3):
        step = run_step(scheduler)  # old finds no block, but young is in the step already: it keeps what it has
        assert ids(step.entries) == [("young", 1)] and not step.preempted
    step = run_step(scheduler)  # now young needs one too, and is the one to leave
    assert [seq.id for seq in step.preempted] == ["young"] and ids(step.entries) == [("old", 4)]


def test_swap_falls_back_to_recompute_when_the_host_is_full():
    engine = FakeEngine(9, 2, None, max_num_batched_tokens=16, preemption="swap", max_swap_blocks=1)
    engine.add([0, 1, 2, 0], 12), engine.add([1, 1, 1], 12)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats["preemptions"] >= 1 and stats["swaps"] == 0 and stats["recomputed_tokens"] > 0


def test_F29_a_client_that_leaves_while_its_step_runs():
    engine = FakeEngine(9, 4, "radix", max_num_batched_tokens=16)
    seq, other = engine.add([1] * 8, 5), engine.add([2] * 3, 5)
    engine.step(leaves=seq)
    assert seq.num_computed == 0 and engine.scheduler.stats()["live"] == 1 and engine.cache.num_blocks == 0
    engine.run()
    assert engine.done == [other]
    engine.check_empty()


def swapped_out():
    """An engine whose second sequence has just been planned to be swapped out, and that sequence."""
    engine = FakeEngine(9, 2, "radix", max_num_batched_tokens=16, preemption="swap")
    first, second = engine.add([0, 1, 2, 0], 12), engine.add([1, 1, 1], 12)
    while engine.scheduler.stats()["free"] or engine.scheduler.stats()["cached"] or second.num_computed % 2 == 0:
        engine.step()
    return engine, first, second


def test_a_step_that_fails_before_the_swap_out_was_made_loses_nothing():
    engine, first, second = swapped_out()
    while not second.preemptions:
        assert engine.step(fails=first.num_computed % 2 == 0).entries
    assert second.state == "waiting" and second.num_computed == 0 and second.host is None
    assert engine.scheduler.stats()["swapped_blocks"] == 0
    engine.run()
    assert engine.done == [second]
    engine.check_empty()


def test_a_step_that_fails_before_the_swap_in_was_made_leaves_nothing_in_the_cache():
    engine, first, second = swapped_out()
    while second.state != "swapped":
        engine.step()
    prompt = list(second.tokens)
    engine.end(first, engine.scheduler.finish)
    engine.scheduler.drop_cache()
    assert [seq for seq, _ in engine.step(fails=True).swap_in] == [second]
    assert second.state == "finished" and engine.scheduler.cache.cached_length(prompt) == 0
    engine.check_empty()


# ---- the budget


def test_decodes_come_first_and_a_long_prompt_comes_in_slices():
    scheduler = scheduler_of(max_num_batched_tokens=8, max_num_seqs=4)
    for name in "ab":
        scheduler.add(Sequence([1] * 3, 20, id=name))
    run_step(scheduler)
    scheduler.add(Sequence([1] * 20, 20, id="long"))
    scheduler.add(Sequence([1] * 4, 20, id="late"))
    sizes = [ids(run_step(scheduler).entries) for _ in range(5)]
    assert sizes[:3] == [[("a", 1), ("b", 1), ("long", 6)]] * 3
    assert sizes[3] == [("a", 1), ("b", 1), ("long", 2), ("late", 4)]
    assert sizes[4] == [("a", 1), ("b", 1), ("long", 1), ("late", 1)]


def test_unchunked_a_prompt_is_computed_in_one_step_or_waits():
    scheduler = scheduler_of(max_num_batched_tokens=16, max_model_len=16, chunked=False)
    for name, length in (("a", 9), ("b", 9), ("c", 2)):
        scheduler.add(Sequence([1] * length, 5, id=name))
    assert ids(run_step(scheduler).entries) == [("a", 9)]
    assert ids(run_step(scheduler).entries) == [("a", 1), ("b", 9), ("c", 2)]


def test_guesses_ride_along_and_the_budget_cuts_them():
    scheduler = scheduler_of(max_num_batched_tokens=6)
    a, b = Sequence([1] * 2, 20, id="a"), Sequence([1] * 2, 20, id="b")
    scheduler.add(a), scheduler.add(b)
    run_step(scheduler)
    for seq in (a, b):
        seq.tokens += [7, 7, 7]
        seq.num_draft = 3
    step = scheduler.schedule()
    assert ids(step.entries) == [("a", 4), ("b", 2)] and len(a.block_table) == 2
    scheduler.computed(step)
    scheduler.truncate(a, 4)  # all but the first guess were wrong
    assert a.num_computed == 4 and len(a.block_table) == 1 and b.num_computed == 4


def test_a_newcomer_must_find_room_for_its_whole_prompt_and_a_reserve():
    for reserve, admitted in ((0, True), (0.2, False)):  # 8 blocks, of which 0.2 is 1
        scheduler = scheduler_of(num_blocks=9, block_size=4, max_num_batched_tokens=24, watermark=reserve)
        scheduler.add(Sequence([1] * 20, 4, id="long"))
        scheduler.add(Sequence([2] * 12, 4, id="next"))  # its first chunk would fit in any case
        assert ids(run_step(scheduler).entries) == [("long", 20)] + [("next", 4)] * admitted
    scheduler.finish(scheduler.sequences["long"])
    assert ids(run_step(scheduler).entries) == [("next", 12)]


def test_the_trace_line_says_what_happens():
    scheduler = scheduler_of(cache="radix", max_num_batched_tokens=8)
    scheduler.add(Sequence(list(range(9)), 4, id="a"))
    assert scheduler.schedule().describe() == (
        "step 1: 8 tokens | prefill a [0:8] of 9 | free 30 cached 0 of 32, running 1 waiting 0"
    )


# ---- policies


def test_lpm_takes_the_longest_cached_prefix_but_starves_nobody():
    scheduler = scheduler_of(cache="radix", max_num_seqs=1, max_num_batched_tokens=64, policy="lpm")

    def serve():
        (entry,) = run_step(scheduler).entries
        scheduler.finish(entry[0])
        return entry[0].id

    scheduler.add(Sequence([1] * 16, 1, id="warm up"))
    assert serve() == "warm up"
    scheduler.add(Sequence([2] * 16, 1, id="stranger"))
    for i in range(policies.LPM_PATIENCE + 5):
        scheduler.add(Sequence([1] * 8 + [i, i], 1, id=i))
    order = [serve() for _ in range(policies.LPM_PATIENCE + 6)]
    assert order.index("stranger") == policies.LPM_PATIENCE
    assert order == [
        *range(policies.LPM_PATIENCE),
        "stranger",
        *range(policies.LPM_PATIENCE, policies.LPM_PATIENCE + 5),
    ]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "lpm"])
def test_planning_looks_at_a_bounded_part_of_the_queue(policy, monkeypatch):
    """Counted, not timed: tokens looked up and sequences compared per step, with 10 and with 10,000 waiting."""
    looks = {}
    for waiting in (10, 10_000):
        scheduler = scheduler_of(num_blocks=65, cache="radix", max_num_seqs=2, policy=policy)
        for i in range(waiting):
            scheduler.add(Sequence([i % 5] * 6 + [i], 1, id=i, priority=i % 3))
        count = 0
        length = scheduler.cache.cached_length

        def counted(*args, length=length):
            nonlocal count
            count += 1
            return length(*args)

        monkeypatch.setattr(scheduler.cache, "cached_length", counted)
        for _ in range(5):
            for seq, _ in run_step(scheduler).entries:
                scheduler.finish(seq)
        looks[waiting] = count
    assert looks[10_000] <= 10 * policies.LPM_WINDOW and (looks[10] > 0) == (policy == "lpm")


def test_the_waiting_queue_in_order_of_any_key():
    queue = policies.Waiting()
    sequences = [Sequence([1], 1) for _ in range(500)]
    for i, seq in enumerate(sequences):
        queue.push((i * 7 % 500,), seq)
    order = sorted(range(500), key=lambda i: i * 7 % 500)
    assert queue.window(9) == [sequences[i] for i in order[:9]]
    for i in order[1:400]:
        queue.remove(sequences[i])
    assert queue.window(3) == [sequences[i] for i in (order[0], order[400], order[401])]
    assert len(queue) == 101 and len(queue._heap) < 300, "entries of those that left must not pile up"
    queue.remove(sequences[order[0]])
    assert queue.first() is sequences[order[400]]


def test_static_batching_lets_nobody_in_until_all_are_out():
    scheduler = scheduler_of(max_num_seqs=2, max_num_batched_tokens=64, batching="static")
    for i in range(3):
        scheduler.add(Sequence([1] * 4, 8, id=i))
    assert ids(run_step(scheduler).entries) == [(0, 4), (1, 4)]
    scheduler.finish(scheduler.sequences[0])
    for _ in range(3):
        assert ids(run_step(scheduler).entries) == [(1, 1)]
    scheduler.finish(scheduler.sequences[1])
    assert ids(run_step(scheduler).entries) == [(2, 4)]


def test_contiguous_reservation_holds_what_pages_would_not():
    held = {}
    for reserve in ("paged", "contiguous"):
        scheduler = scheduler_of(num_blocks=65, block_size=4, max_num_batched_tokens=64, reserve=reserve)
        for i in range(3):
            scheduler.add(Sequence([1] * 6, 59, id=i))
        run_step(scheduler)
        stats = scheduler.stats()
        held[reserve] = stats["kv_tokens"] / (stats["live"] * 4)
        tables = [seq.block_table for seq in scheduler.running]
        if reserve == "contiguous":
            assert tables == [list(range(table[0], table[0] + 16)) for table in tables]
    assert held == {"paged": 18 / 24, "contiguous": 18 / 192}
