"""The block pool against a dictionary, and the KV tensors against plain copies."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kernels
import kv_paged
from benchmarks.past import allocate_run
from kv_paged import BlockPool, KVCache, OutOfBlocks, block_bytes, blocks_for_budget, blocks_needed, parse_memory
from scheduler import Step


class PoolMachine(RuleBasedStateMachine):
    """Owners come and go; `owned` is a list of the blocks each of them holds."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks):
        self.pool, self.owned = BlockPool(num_blocks, 4), []

    def counts(self):
        held = [block for blocks in self.owned for block in blocks]
        return [held.count(block) for block in range(self.pool.num_blocks)]

    @rule(n=st.integers(0, 6), adjacent=st.booleans())
    def take(self, n, adjacent):
        before = self.counts()
        free = [block for block in range(1, self.pool.num_blocks) if before[block] == 0]
        runs = [start for start in free if all(start + i in free for i in range(n))]
        if adjacent and n and not runs:
            assert allocate_run(self.pool, n) == []
            return
        if n > len(free):
            with pytest.raises(OutOfBlocks, match=f"{n} blocks wanted, {len(free)} of {self.pool.total} free"):
                self.pool.allocate(n)
            return
        blocks = allocate_run(self.pool, n) if adjacent and n else self.pool.allocate(n)
        assert len(set(blocks)) == n and all(before[block] == 0 for block in blocks) and 0 not in blocks
        if adjacent and n:
            assert blocks == list(range(runs[0], runs[0] + n))
        self.owned.append(blocks)

    @rule(data=st.data())
    def share(self, data):
        if self.owned:
            blocks = list(data.draw(st.sampled_from(self.owned)))
            self.pool.share(blocks)
            self.owned.append(blocks)

    @rule(data=st.data())
    def release(self, data):
        if self.owned:
            self.pool.release(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @rule(data=st.data())
    def misuse(self, data):
        """A free block, or the padding block, can be neither shared nor released."""
        block = data.draw(st.sampled_from([0] + [b for b, n in enumerate(self.counts()) if n == 0]))
        with pytest.raises(AssertionError, match="is not in use|more often than taken"):
            self.pool.share([block])
        with pytest.raises(AssertionError, match="is not in use|more often than taken"):
            self.pool.release([block])

    @invariant()
    def books_balance(self):
        if hasattr(self, "pool"):
            counts = self.counts()
            assert self.pool.refs[1:] == counts[1:]
            assert self.pool.num_free == counts[1:].count(0)
            assert self.pool.total == self.pool.num_blocks - 1

    def teardown(self):
        if hasattr(self, "pool"):
            for blocks in self.owned:
                self.pool.release(blocks)
            assert sorted(self.pool.allocate(self.pool.total)) == list(range(1, self.pool.num_blocks))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(stateful_step_count=40)


def test_impossible_pools_are_refused():
    for num_blocks, block_size in ((1, 16), (0, 16), (8, 0), (8, -1)):
        with pytest.raises(ValueError, match="must be at least 1|at least 2"):
            BlockPool(num_blocks, block_size)


def filled_cache(num_blocks=6, block_size=4, dtype=torch.float32):
    cache = KVCache(2, num_blocks, block_size, 3, 6, dtype)
    cache.data.copy_(torch.arange(cache.data.numel()).reshape(cache.data.shape) % 251)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_keys_and_values_of_a_layer_start_as_zeros_in_storages_of_their_own_over_the_same_memory(dtype):
    """A compiled layer that writes into two views of one storage copies all of it, twice a step."""
    cache = KVCache(2, 3, 4, 2, 8, dtype)
    assert cache.nbytes == 3 * block_bytes(2, 4, 2, 8, dtype.itemsize) and not cache.data.any()
    parts = [part for i in range(2) for part in cache.layers[i]]
    assert all(part.shape == (3, 2, 4, 8) and part.dtype == dtype for part in parts)
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)
    parts[3][1, 0, 2] = 5.0
    assert cache.data[1, 1, 1, 0, 2].eq(5).all() and cache.data.count_nonzero() == 8


def write(cache, layer, k, v, slots):
    """What a step does with keys and values; rotated by angle 0, they are stored as they are."""
    qkv = torch.cat([k, k, v], dim=1).flatten(1)  # [T, 3 * kv_heads * head_dim], as many query heads as kv heads
    half = k.shape[2] // 2
    cos_sin = torch.cat([torch.ones(1, half), torch.zeros(1, half)], dim=1)  # of position 0
    positions = torch.zeros(len(k), dtype=torch.int64)
    kernels.rope_write_kv(qkv, positions, cos_sin, *cache.layers[layer], slots, k.shape[1])


@given(st.integers(1, 5), st.integers(1, 12), st.randoms(use_true_random=False))
def test_what_is_written_through_a_block_table_is_read_back(block_size, n_tokens, random):
    table = random.sample(range(1, 13), blocks_needed(n_tokens, block_size))
    cache = KVCache(1, 13, block_size, 2, 4, torch.float32)
    k, v = torch.randn(n_tokens, 2, 4), torch.randn(n_tokens, 2, 4)
    slots = torch.tensor([table[p // block_size] * block_size + p % block_size for p in range(n_tokens)])
    write(cache, 0, k, v, slots)
    for stored, written in zip(cache.layers[0], (k, v), strict=True):
        rows = torch.stack([stored[table[p // block_size], :, p % block_size] for p in range(n_tokens)])
        assert rows.equal(written)


def test_copies_read_every_source_before_any_write():
    cache = filled_cache()
    before = cache.data.clone()
    cache.copy_blocks([(1, 2), (3, 1)])  # 1 is a source and a target
    assert cache.data[:, :, 2].equal(before[:, :, 1]) and cache.data[:, :, 1].equal(before[:, :, 3])
    assert cache.data[:, :, 3:].equal(before[:, :, 3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swap_round_trip_is_exact(dtype):
    cache = filled_cache(dtype=dtype)
    before = cache.data.clone()
    host = cache.swap_out([4, 2, 5])
    cache.data[:, :, 1:] = -1
    cache.swap_in(host, [1, 3])  # only the first two, somewhere else
    assert cache.data[:, :, 1].equal(before[:, :, 4]) and cache.data[:, :, 3].equal(before[:, :, 2])
    assert cache.data[:, :, 2].eq(-1).all() and cache.data[:, :, 4:].eq(-1).all()


def test_a_step_moves_blocks_out_then_copies_then_in():
    """One block plays all parts: block 2 leaves for the host, gets a copy of 1, and a sequence returns into 1."""
    cache = filled_cache()
    before = cache.data.clone()
    leaves, returns = SimpleNamespace(host=None), SimpleNamespace(host=cache.swap_out([4]))
    cache.apply(Step(1, swap_out=[(leaves, [2])], copies=[(1, 2)], swap_in=[(returns, [1])]))
    assert leaves.host[:, :, 0].equal(before[:, :, 2]) and returns.host is None
    assert cache.data[:, :, 2].equal(before[:, :, 1]) and cache.data[:, :, 1].equal(before[:, :, 4])


def test_the_pool_is_sized_from_memory():
    shape = dict(num_layers=32, block_size=16, kv_heads=8, head_dim=128, itemsize=2)
    assert block_bytes(**shape) == 16 * 128 * 1024  # a Llama-3-8B shape: 128 KiB a token
    assert blocks_for_budget(2**30, **shape) == 512
    assert blocks_for_budget(None, **shape, free=2**32) == 4 * 512 * kv_paged.DEFAULT_MEMORY_SHARE
    with pytest.raises(ValueError, match="KV memory of 2,097,152 bytes holds 1 blocks .* raise --kv-memory"):
        blocks_for_budget(2**21, **shape)
    text = kv_paged.describe_capacity(BlockPool(513, 16), 2048, block_bytes(**shape))
    assert "512 blocks of 16 tokens = 8,192 tokens" in text and "4.0 requests of the full 2,048 tokens" in text


def test_memory_sizes():
    sizes = {"4096": 4096, "2k": 2048, "1.5G": 3 * 2**29, "512 MiB": 2**29, "1TB": 2**40}
    assert {text: parse_memory(text) for text in sizes} == sizes
    for text in ("", "G", "-1G", "0", "1X", "1e9", "2GG"):
        with pytest.raises(ValueError, match="memory size .*: write a positive number"):
            parse_memory(text)
