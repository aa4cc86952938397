"""The scheduler against a fake engine that sees every read and write: nothing lost, nothing doubled, nothing stale."""

import random

import pytest
from fake_engine import FakeEngine, alone
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from benchmarks.past import scheduler_class
from kv_paged import BlockPool, BlockTables
from radix import PREFIX_CACHES
from scheduler import LPM_PATIENCE, LPM_WINDOW, RequestTooLong, Scheduler, Sequence


def ids(entries):
    return [(seq.id, n) for seq, n in entries]


def scheduler_of(num_blocks=33, block_size=4, cache=None, make=Scheduler, **options):
    pool = BlockPool(num_blocks, block_size)
    return make(pool, PREFIX_CACHES[cache or "none"](pool), **options)


def run_step(scheduler, token=0):
    """Plan, compute and give every sequence that was caught up one more token."""
    step = scheduler.schedule()
    scheduler.computed(step)
    for seq, _ in step.entries:
        if seq.num_new == 0:
            seq.tokens.append(token)
    return step


# ---- what is refused, and with which numbers


def test_what_can_never_finish_is_refused_and_what_just_fits_is_served():
    scheduler = scheduler_of(max_model_len=64)
    for length in (64, 65, 1000):
        with pytest.raises(RequestTooLong, match=f"prompt of {length} tokens .* max_model_len=64; at most 63 fit"):
            scheduler.add(Sequence([1] * length, 1))
    assert not scheduler.has_unfinished()
    for max_tokens in (1, 10_000):
        engine = FakeEngine(17, 4, max_model_len=64)
        seq = engine.add([1] * 63, max_tokens)
        engine.run()
        assert seq.tokens == alone([1] * 63, None, 0, 64)
    engine = FakeEngine(4, 4, max_model_len=64)  # 12 slots, and the last token needs none
    engine.add([1] * 8, 5)
    engine.run()
    with pytest.raises(RequestTooLong, match="prompt of 8 tokens with max_tokens=6 needs KV memory for 13 .* holds 12"):
        engine.scheduler.add(Sequence([1] * 8, 6))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"cache": None, "chunked": False, "max_num_batched_tokens": 8, "max_model_len": 9}, "reach max_model_len=9"),
        ({"cache": "radix", "reserve": "contiguous"}, "turn the prefix cache off"),
    ],
)
def test_switches_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        FakeEngine(**options)


# ---- leaving


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
def test_a_preempted_sequence_keeps_its_tokens_and_its_prompt_length(preemption):
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


def test_the_youngest_is_preempted_first_and_returns_first():
    scheduler = scheduler_of(num_blocks=8, block_size=4, max_num_batched_tokens=32)
    for name in "abc":
        scheduler.add(Sequence([1] * 7, 20, id=name))
    scheduler.add(Sequence([1] * 3, 4, id="d"))
    assert ids(run_step(scheduler).entries) == [("a", 7), ("b", 7), ("c", 7), ("d", 3)]
    assert ids(run_step(scheduler).entries) == [("a", 1), ("b", 1), ("c", 1), ("d", 1)]
    step = run_step(scheduler)
    assert [seq.id for seq in step.preempted] == ["d", "c"] and ids(step.entries) == [("a", 1), ("b", 1)]
    assert "preempt d (recompute)" in step.describe() and scheduler.stats()["free"] == 1
    scheduler.add(Sequence([1], 1, id="e", arrival=-1.0))  # "older" than all, but c and d have run before
    assert [seq.id for seq in scheduler.waiting] == ["e", "d", "c"]
    scheduler.finish(scheduler.sequences["a"])
    assert ids(run_step(scheduler).entries) == [("b", 1), ("c", 9)]  # d needs two blocks, one is free: e waits too
    scheduler.finish(scheduler.sequences["b"])
    assert ids(run_step(scheduler).entries) == [("c", 1), ("d", 5), ("e", 1)]


def test_by_priority_the_least_important_is_preempted():
    scheduler = scheduler_of(num_blocks=7, block_size=4, max_num_batched_tokens=32, policy="priority")
    for name, priority in (("low", 9), ("high", 0), ("middle", 5)):
        scheduler.add(Sequence([1] * 8, 16, id=name, priority=priority))
    assert ids(run_step(scheduler).entries) == [("high", 8), ("middle", 8), ("low", 8)]
    step = run_step(scheduler)
    assert [seq.id for seq in step.preempted] == ["low"] and ids(step.entries) == [("high", 1), ("middle", 1)]


def test_a_better_ranked_sequence_is_never_preempted():
    scheduler = scheduler_of(num_blocks=7, block_size=4, max_num_batched_tokens=8)
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


def test_a_draft_goes_with_its_decode_before_better_ranked_prompts():
    scheduler = scheduler_of(max_num_batched_tokens=6)
    decoding = Sequence([1] * 2, 20, id="decoding", arrival=2.0)
    scheduler.add(decoding)
    run_step(scheduler)
    scheduler.add(Sequence([1] * 20, 20, id="prompt", arrival=1.0))
    run_step(scheduler)
    decoding.tokens += [7, 7]
    decoding.num_draft = 2
    assert ids(run_step(scheduler).entries) == [("decoding", 3), ("prompt", 3)]


def test_a_newcomer_must_find_room_for_its_whole_prompt_and_a_reserve():
    for reserve, admitted in ((0, True), (1, False)):
        scheduler = scheduler_of(num_blocks=9, block_size=4, max_num_batched_tokens=24)
        scheduler.reserve_blocks = reserve
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
    for i in range(LPM_PATIENCE + 5):
        scheduler.add(Sequence([1] * 8 + [i, i], 1, id=i))
    order = [serve() for _ in range(LPM_PATIENCE + 6)]
    assert order == [*range(LPM_PATIENCE), "stranger", *range(LPM_PATIENCE, LPM_PATIENCE + 5)]


def test_planning_looks_at_a_bounded_part_of_the_queue(monkeypatch):
    """Counted, not timed: prefixes looked up in five steps with 10,000 waiting."""
    for policy, most in (("fcfs", 0), ("priority", 0), ("lpm", 10 * LPM_WINDOW)):
        scheduler = scheduler_of(num_blocks=65, cache="radix", max_num_seqs=2, policy=policy)
        for i in range(10_000):
            scheduler.add(Sequence([i % 5] * 6 + [i], 1, id=i, priority=i % 3))
        looks, length = [], scheduler.cache.cached_length
        monkeypatch.setattr(scheduler.cache, "cached_length", lambda *args: looks.append(args) or length(*args))  # noqa: B023
        for _ in range(5):
            for seq, _ in run_step(scheduler).entries:
                scheduler.finish(seq)
        assert bool(most) <= len(looks) <= most


def test_static_batching_lets_nobody_in_until_all_are_out():
    scheduler = scheduler_of(max_num_seqs=2, max_num_batched_tokens=64, make=scheduler_class("static"))
    for i in range(3):
        scheduler.add(Sequence([1] * 4, 8, id=i))
    assert ids(run_step(scheduler).entries) == [(0, 4), (1, 4)]
    scheduler.finish(scheduler.sequences[0])
    for _ in range(3):
        assert ids(run_step(scheduler).entries) == [(1, 1)]
    scheduler.finish(scheduler.sequences[1])
    assert ids(run_step(scheduler).entries) == [(2, 4)]


# ---- prefixes


@pytest.mark.parametrize("cache", ["radix", "hash"])
@pytest.mark.parametrize("length", [7, 8, 9])
def test_a_prompt_seen_before_leaves_a_token_to_compute(cache, length):
    engine = FakeEngine(17, 4, cache, max_num_batched_tokens=64)
    prompt = [i % 3 for i in range(length)]
    first = engine.add(prompt, 3)
    engine.run()
    second = engine.add(prompt, 3)
    step = engine.step()
    assert second.num_cached == (length - 1) // 4 * 4 < length
    assert ids(step.entries) == [(second.id, length - second.num_cached)]
    engine.run()
    assert second.tokens == first.tokens


def test_conversations_and_preempted_requests_find_their_prefix_again():
    engine = FakeEngine(17, 4, "radix", max_num_batched_tokens=64)
    seq = engine.add([1, 2] * 4, 9)
    engine.run()
    turn = engine.add(seq.tokens + [2, 2, 2], 2)
    engine.run()
    assert turn.num_cached == 16
    engine = FakeEngine(11, 2, "radix", max_num_batched_tokens=16)
    engine.add([0, 1, 2, 0], 12), engine.add([1, 1, 1], 12)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats["preemptions"] and stats["recomputed_tokens"] < 10


def test_read_cache_false_computes_the_whole_prompt_and_still_leaves_it_behind():
    engine = FakeEngine(17, 4, "radix", max_num_batched_tokens=64)
    for read_cache, cached in ((False, 0), (False, 0), (True, 8)):
        seq = engine.add([1] * 11, 2, read_cache=read_cache)
        engine.run()
        assert seq.num_cached == cached
    assert engine.cache.num_blocks == 3, "equal blocks are kept once"


# ---- forks


def test_samples_share_the_prompt_and_copy_only_the_block_they_write():
    engine = FakeEngine(33, 4, None, max_num_batched_tokens=64)
    seq = engine.add([1] * 10, 6)
    step = engine.scheduler.schedule()
    for entry, n in step.entries:
        engine._compute(entry, n, broken=False)
    engine.scheduler.computed(step)
    children = [engine.fork(seq, salt) for salt in (1, 2, 3)]
    assert engine.scheduler.stats()["live"] == 3 and {child.group for child in children} == {seq.id}
    for relative in (seq, *children):
        engine._sample(relative)
    step = engine.step()
    assert len(step.copies) == 3
    assert engine.scheduler.stats()["live"] == 2 + 4, "two full prompt blocks shared, one own block each"
    engine.run()
    assert engine.scheduler.stats()["copies"] == 3
    engine.check_empty()


def test_a_fork_without_a_batch_slot_waits_at_the_head_and_catches_up():
    engine = FakeEngine(33, 4, "radix", max_num_seqs=1, max_num_batched_tokens=64)
    seq, other = engine.add([1] * 9, 6), engine.add([2] * 9, 2)
    engine.step()
    child = engine.fork(seq, salt=5)
    assert child.state == "waiting" and child.num_prompt == 9 and engine.scheduler.waiting[-1] is child
    engine.run()
    assert engine.done == [seq, child, other] and len(child.tokens) == 15


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("reserve", ["paged", "contiguous"])
@pytest.mark.parametrize("slots, blocks", [(4, 120), (5, 120), (12, 17), (7, 25), (12, 33)])
def test_groups_that_wait_for_each_other_all_get_on(preemption, reserve, slots, blocks):
    """Members advance only together. Slots or blocks are short, so that each group holds what another waits for."""
    options = {"preemption": preemption, "reserve": reserve, "watermark": 0.2}
    engine = FakeEngine(blocks, 4, None, max_num_seqs=slots, max_num_batched_tokens=32, **options)
    groups = [engine.march([n % 3] * n, 15 - n, width=4) for n in (5, 6, 5)]
    single = engine.add([2, 1], 14)
    engine.run(most=400)
    assert all(group is not None for group in groups) and len(engine.done) == 13 and single in engine.done
    engine.check_empty()


def test_a_group_that_fills_the_whole_pool_needs_no_reserve():
    engine = FakeEngine(17, 4, None, max_num_seqs=5, max_num_batched_tokens=32, watermark=0.2)
    engine.add([1, 1], 26)
    engine.march([2], 14, width=4)  # four times four blocks at the end: all sixteen
    engine.run(most=200)
    assert len(engine.done) == 5 and engine.scheduler.stats()["preemptions"]
    engine.check_empty()


# ---- what the fake engine would notice


def test_a_missing_copy_on_write_is_noticed(monkeypatch):
    monkeypatch.setattr(BlockTables, "_shared", lambda self, seq: [])
    engine = FakeEngine(33, 4, None)
    engine.march([1] * 6, 6, width=2)
    with pytest.raises(AssertionError, match="written while somebody else can read it"):
        engine.run()


def test_a_wrong_slot_is_noticed(monkeypatch):
    slot = FakeEngine._slot
    wrong = lambda self, seq, p: slot(self, seq, p) + (p == 4 and seq.num_computed == 0)  # noqa: E731
    monkeypatch.setattr(FakeEngine, "_slot", wrong)
    engine = FakeEngine(33, 4, None, max_num_batched_tokens=64)
    engine.add([1] * 6, 6)
    with pytest.raises(AssertionError, match="reads another sequence's K and V at 4"):
        engine.run()


# ---- anything in any order

CHOICES = {
    "num_blocks": [4, 7, 9, 11, 14],
    "block_size": [1, 2, 4],
    "cache": [None, "radix", "radix", "hash"],
    "max_num_seqs": [4, 5, 3, 1],
    "max_num_batched_tokens": [12, 8, 5, 3, 1],
    "policy": ["fcfs", "priority", "lpm"],
    "preemption": ["recompute", "swap"],
    "chunked": [True, True, False],
    "batching": ["continuous", "continuous", "continuous", "static"],
    "reserve": ["paged", "paged", "paged", "contiguous"],
    "watermark": [0, 0.01, 0.2],
}
NAMESPACES = [None, None, None, ("lora", "x"), ("salt", "x")]


def engine_for(rng):
    config = {name: rng.choice(values) for name, values in CHOICES.items()}
    config["max_model_len"] = max(2, min((config["num_blocks"] - 1) * config["block_size"] + 1, 24))
    if not config["chunked"]:
        config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], config["max_model_len"])
    if config["reserve"] == "contiguous":
        config["cache"] = None
    engine = FakeEngine(**config)
    engine.stems = [[rng.randrange(2) for _ in range(rng.randint(1, 16))] for _ in range(3)]
    return engine


def sequences(engine, running=False):
    """Those without guesses; running: those that decode, and do not go in step with others."""
    live = [seq for seq in engine.expected if not seq.num_draft]
    if running:
        live = [seq for seq in live if seq.state == "running" and seq.num_new == 1 and seq.group not in engine.marching]
    return live


def arrive(engine, rng):
    """A request that begins as others did, or the next turn of a conversation."""
    tokens, namespace = rng.choice(engine.stems), rng.choice(NAMESPACES)
    if engine.done and rng.random() < 0.3:
        earlier = rng.choice(engine.done)
        tokens, namespace = earlier.tokens, earlier.namespace
    tokens = (tokens + [rng.randrange(3) for _ in range(rng.randint(0, 6))])[: engine.scheduler.max_model_len - 1]
    options = {"priority": rng.randrange(3), "namespace": namespace, "read_cache": rng.random() < 0.9}
    if len(engine.expected) < 10:
        engine.add(tokens, rng.randint(1, 20), **options)


def beams_arrive(engine, rng):
    if len(engine.expected) < 8:
        tokens = rng.choice(engine.stems)[: engine.scheduler.max_model_len - 1]
        engine.march(tokens, rng.randint(1, 12), rng.randint(2, 4))


def guess_and_step(engine, rng):
    for seq in list(engine.expected):
        if rng.random() < 0.4:
            engine.guess(seq, rng.randint(0, 3), rng.randint(1, 4))
    engine.step()


def fork(engine, rng):
    free = [seq for seq in sequences(engine) if seq.group not in engine.marching]
    if free and len(engine.expected) < 10:
        engine.fork(rng.choice(sequences(engine, running=True) or free), rng.randrange(1, 6))


def rewind(engine, rng):
    """Take back decided tokens too, down to the prompt: goes back into cached and shared blocks."""
    longer = [seq for seq in sequences(engine, running=True) if len(seq.tokens) > seq.num_prompt]
    if longer:
        seq = rng.choice(longer)
        engine.rewind(seq, rng.randint(seq.num_prompt, len(seq.tokens) - 1))


def end(engine, rng):
    if live := sequences(engine):
        engine.end(rng.choice(live), rng.choice([False, True]))
    for seq in engine.done[-2:]:
        engine.scheduler.finish(seq, keep=False), engine.scheduler.finish(seq)  # ended already: nothing happens


def fail(engine, rng):
    if engine.scheduler.has_unfinished():
        engine.step(fails=True)


def leave_during_a_step(engine, rng):
    if live := sequences(engine):
        engine.step(leaves=rng.choice(live))


def drop_cache(engine, rng):
    engine.scheduler.drop_cache()
    assert engine.scheduler.stats()["cached"] == 0


# And how often, in a hundred.
ACTIONS = {arrive: 23, beams_arrive: 4, fork: 4, rewind: 2, end: 3, fail: 1, drop_cache: 1, leave_during_a_step: 2}
ACTIONS |= {guess_and_step: 60}
RANDOMS = st.randoms(use_true_random=False)


class SchedulerMachine(RuleBasedStateMachine):
    """Any actions in any order; free + cached + live == total and every reference count are checked after each."""

    @initialize(rng=RANDOMS, requests=st.integers(3, 6))
    def start(self, rng, requests):
        self.engine = engine_for(rng)
        for _ in range(requests):
            arrive(self.engine, rng)

    @rule(action=st.sampled_from(list(ACTIONS)), rng=RANDOMS)
    def act(self, action, rng):
        action(self.engine, rng)

    @rule(times=st.integers(1, 8))
    def steps(self, times):
        for _ in range(times):
            self.engine.step()
            self.engine.check()

    @invariant()
    def books_balance(self):
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.run()
            self.engine.check_empty()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(stateful_step_count=30, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("seed", range(300))
def test_long_random_run(seed):
    """What the machine above does, for longer and with the weights of real life: hypothesis shrinks, this one hunts."""
    rng = random.Random(seed)
    engine = engine_for(rng)
    for action in rng.choices(list(ACTIONS), ACTIONS.values(), k=120):
        action(engine, rng)
        engine.check()
    engine.run()
    engine.check_empty()
