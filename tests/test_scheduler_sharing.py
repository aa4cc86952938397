"""What sequences share: cached prefixes, samples of one prompt, beams; and the field cases about prefixes."""

import pytest
from fake_engine import FakeEngine


def ids(entries):
    return [(seq.id, n) for seq, n in entries]


# ---- prefixes


@pytest.mark.parametrize("cache", ["radix", "hash"])
@pytest.mark.parametrize("length", [7, 8, 9])
def test_F36_a_prompt_seen_before_leaves_a_token_to_compute(cache, length):
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


@pytest.mark.parametrize("cache", ["radix", "hash"])
def test_F38_adapters_salts_and_plain_requests_share_nothing(cache):
    engine = FakeEngine(33, 4, cache, max_num_batched_tokens=64)
    for namespace in (None, ("lora", "X"), ("salt", "X")):
        for expected in (0, 8):
            seq = engine.add([1] * 9, 2, namespace=namespace)
            engine.run()
            assert seq.num_cached == expected


@pytest.mark.parametrize("cache", ["radix", "hash"])
def test_F39_a_reused_block_is_no_longer_found(cache):
    engine = FakeEngine(4, 4, cache, max_num_batched_tokens=64)
    for prompt in ([0] * 10, [1] * 10, [0] * 10):
        seq = engine.add(prompt, 2)  # needs all three blocks; a stale hit would be read as another's K and V
        engine.run()
        assert seq.num_cached == 0
    assert engine.scheduler.stats()["evicted_blocks"] >= 4


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
    for read_cache, found in ((False, 0), (False, 0), (True, 8)):
        seq = engine.add([1] * 11, 2, read_cache=read_cache)
        engine.run()
        assert seq.num_cached == found
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


@pytest.mark.parametrize("cache", [None, "radix", "hash"])
def test_beam_search_forks_of_forks_with_branches_ending(cache):
    engine = FakeEngine(41, 4, cache, max_num_seqs=4, max_num_batched_tokens=64)
    beams = [engine.add([0, 1, 2, 0, 1], 30)]
    for salt in range(25):
        engine.step()
        beams = [beam for beam in beams if beam.state == "running"]
        assert beams and all(beam.num_new == 1 for beam in beams)
        best = beams[salt % len(beams)]
        for loser in [beam for beam in beams if beam is not best][: len(beams) - 2 if len(beams) > 2 else 0]:
            engine.end(loser, engine.scheduler.finish)
            beams.remove(loser)
        beams += [engine.fork(best, salt + 1), engine.fork(best, salt + 2)]
        engine.check()
    assert engine.scheduler.stats()["copies"] > 0
    engine.run()
    engine.check_empty()


def test_a_fork_without_a_seat_waits_at_the_head_and_catches_up():
    engine = FakeEngine(33, 4, "radix", max_num_seqs=1, max_num_batched_tokens=64)
    seq, other = engine.add([1] * 9, 6), engine.add([2] * 9, 2)
    engine.step()
    child = engine.fork(seq, salt=5)
    assert child.state == "waiting" and child.num_prompt == 9 and engine.scheduler.waiting.first() is child
    engine.run()
    assert engine.done == [seq, child, other] and len(child.tokens) == 15


def test_guesses_taken_back_into_a_cached_block_never_change_it():
    engine = FakeEngine(17, 4, "radix", max_num_batched_tokens=64)
    seq = engine.add([1] * 6, 12)
    for _ in range(4):
        engine.step()
    reader = engine.add(seq.tokens[:8] + [2], 9)  # stands on the two blocks that seq has filled
    engine.step()
    assert reader.num_cached == 8 and reader.block_table[:2] == seq.block_table[:2]
    engine.rewind(seq, 7)
    step = engine.step()
    assert [source for source, _ in step.copies] == [reader.block_table[1]]
    assert reader.block_table[0] == seq.block_table[0] and reader.block_table[1] != seq.block_table[1]
    engine.run()
    engine.check_empty()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("reserve", ["paged", "contiguous"])
@pytest.mark.parametrize("seats, blocks", [(4, 120), (5, 120), (12, 17), (7, 25), (12, 33)])
def test_groups_that_wait_for_each_other_all_get_on(preemption, reserve, seats, blocks):
    """Members advance only together. Seats or blocks are short, so that each group holds what another waits for."""
    engine = FakeEngine(
        blocks,
        4,
        None,
        max_num_seqs=seats,
        max_num_batched_tokens=32,
        preemption=preemption,
        reserve=reserve,
        watermark=0.2,
    )
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
