"""Both prefix caches against a dictionary from whole prefixes to blocks."""

import random
from types import SimpleNamespace

import pytest
from fake_engine import check_cache
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_paged import BlockPool, OutOfBlocks
from radix import HashCache, RadixCache


class SameHash(HashCache):
    hash_function = staticmethod(lambda key: 7)


CACHES = {"radix": RadixCache, "hash": HashCache}
KINDS = {**CACHES, "same hash": SameHash}
NAMESPACES = [None, None, ("lora", "x"), ("salt", "x"), "x"]


def lock(cache, tokens, namespace=None):
    handle = cache.match(tokens, namespace).handle
    cache.lock(handle)
    return handle


def keep(cache, tokens, blocks, namespace=None):
    """What a sequence does that computed all of its tokens and ends."""
    cache.unlock(cache.insert(tokens, blocks, lock(cache, [], namespace)).handle)


class Model:
    """Drives a cache and a dictionary (namespace, prefix) -> block side by side."""

    def __init__(self, kind, block_size, num_blocks):
        self.pool = BlockPool(num_blocks, block_size)
        self.cache = KINDS[kind](self.pool)
        self.known, self.holders, self.size, self.evicted = {}, [], block_size, 0

    def prefixes(self, tokens, namespace):
        return [(namespace, tuple(tokens[:end])) for end in range(self.size, len(tokens) + 1, self.size)]

    def expected(self, tokens, namespace):
        blocks = []
        for prefix in self.prefixes(tokens, namespace):
            if prefix not in self.known:
                break
            blocks.append(self.known[prefix])
        return blocks

    def match(self, tokens, namespace, limit=None, hold=False):
        usable = tokens if limit is None else tokens[:limit]
        expected = self.expected(usable, namespace)
        assert self.cache.cached_length(tokens, namespace, limit) == len(expected) * self.size
        match = self.cache.match(tokens, namespace, limit)
        assert match.blocks == expected and match.n_tokens == len(expected) * self.size
        assert match.handle.depth == len(expected)
        if hold:
            self.cache.lock(match.handle)
            self.pool.share(match.blocks)
            holder = SimpleNamespace(handle=match.handle, block_table=match.blocks, namespace=namespace)
            holder.tokens = tokens[: match.n_tokens]
            self.holders.append(holder)

    def insert(self, tokens, namespace, holder=None):
        """Compute what is missing into new blocks and hand over all of it, as a sequence does that ends or goes on."""
        start = len(holder.block_table) if holder else 0
        n = len(tokens) // self.size
        try:
            own = self.pool.allocate(n - start)
        except OutOfBlocks:
            return
        table = (holder.block_table if holder else []) + own
        handle = holder.handle if holder else lock(self.cache, [], namespace)
        match = self.cache.insert(tokens, table, handle)
        for prefix, block in zip(self.prefixes(tokens, namespace), table, strict=True):
            self.known.setdefault(prefix, block)
        held = self.expected(tokens, namespace)
        assert len(held) == n and match.blocks == held[start:]
        if holder:
            self.pool.share(match.blocks)
            holder.handle, holder.block_table, holder.tokens = match.handle, held, tokens[: n * self.size]
        else:
            self.cache.unlock(match.handle)
        self.pool.release(own)

    def shorten(self, holder, depth):
        self.pool.release(holder.block_table[depth:])
        del holder.block_table[depth:], holder.tokens[depth * self.size :]
        holder.handle = self.cache.retreat(holder.handle, depth)

    def withdraw(self, holder):
        prefix = (holder.namespace, tuple(holder.tokens))

        def on_or_below(namespace, tokens):
            return namespace == prefix[0] and tuple(tokens[: len(prefix[1])]) == prefix[1]

        alone = sum(on_or_below(h.namespace, h.tokens) for h in self.holders) == 1
        last = sum(on_or_below(*other) for other in self.known) == 1
        handle = self.cache.withdraw(holder.handle)
        assert (handle is not None) == bool(alone and last and holder.tokens)
        if handle is not None:
            del self.known[prefix]
            holder.handle = handle
            self.pool.release([holder.block_table.pop()])
            del holder.tokens[-self.size :]

    def leave(self, holder):
        self.holders.remove(holder)
        self.cache.unlock(holder.handle)
        self.pool.release(holder.block_table)

    def evict(self, n):
        used = {block for holder in self.holders for block in holder.block_table}
        possible = [block for block in self.known.values() if block not in used]
        free = self.pool.num_free
        freed = self.cache.evict(n)
        self.evicted += freed
        assert freed == min(n, len(possible)) and self.pool.num_free == free + freed
        assert self.cache.evicted == self.evicted
        self.known = {prefix: block for prefix, block in self.known.items() if self.pool.refs[block]}
        for namespace, prefix in self.known:  # nothing is left whose beginning is gone
            assert all(p in self.known for p in self.prefixes(prefix, namespace))

    def check(self):
        blocks = check_cache(self.cache, self.holders)
        assert blocks == set(self.known.values()) and len(self.known) == len(blocks)
        used = {block for holder in self.holders for block in holder.block_table}
        assert self.cache.num_evictable == len(blocks - used)
        for block in range(1, self.pool.num_blocks):
            owners = sum(block in holder.block_table for holder in self.holders) + (block in blocks)
            assert self.pool.refs[block] == owners
        assert self.pool.num_free + self.cache.num_evictable + len(used) == self.pool.total

    def act(self, action, rng):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(6 * self.size + 3))]  # mostly not whole blocks
        namespace = rng.choice(NAMESPACES)
        holder = rng.choice(self.holders) if self.holders else None
        if action == "match":
            limit = rng.choice([None, rng.randrange(15)])
            self.match(tokens, namespace, limit, hold=len(self.holders) < 8 and rng.random() < 0.8)
        elif action == "insert":
            self.insert(tokens, namespace)
        elif action == "evict":
            self.evict(rng.randint(1, 6))
        elif holder and action == "go on":
            self.insert(holder.tokens + tokens, holder.namespace, holder)
        elif holder and action == "fork" and len(self.holders) < 8:
            self.match(holder.tokens, holder.namespace, hold=True)
        elif holder and action == "shorten":
            self.shorten(holder, rng.randint(0, len(holder.block_table)))
        elif holder and action == "withdraw":
            self.withdraw(holder)
        elif holder and action == "leave":
            self.leave(holder)

    def end(self):
        for holder in list(self.holders):
            self.leave(holder)
        self.evict(100)
        assert self.pool.num_free == self.pool.total and not self.cache.roots


# And how often, in a hundred.
ACTIONS = {"match": 22, "insert": 20, "go on": 15, "fork": 3, "shorten": 8, "withdraw": 4, "leave": 13, "evict": 15}


class CacheMachine(RuleBasedStateMachine):
    """Any actions in any order; every counter, lock and reference count is recomputed after each."""

    @initialize(kind=st.sampled_from(list(KINDS)), size=st.sampled_from([1, 2, 4]))
    def start(self, kind, size):
        self.model = Model(kind, size, 20)

    @rule(action=st.sampled_from(list(ACTIONS)), rng=st.randoms(use_true_random=False))
    def act(self, action, rng):
        self.model.act(action, rng)

    @invariant()
    def books_balance(self):
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self):
        if hasattr(self, "model"):
            self.model.end()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(stateful_step_count=40)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_2000_operations_keep_every_counter_right(kind, size, seed):
    rng = random.Random(seed)
    model = Model(kind, size, 60)
    for action in rng.choices(list(ACTIONS), ACTIONS.values(), k=2000):
        model.act(action, rng)
        model.check()
    model.end()


@pytest.mark.parametrize("kind", KINDS)
def test_equal_hashes_and_equal_low_bits_are_not_equal_tokens(kind):
    pool = BlockPool(16, 4)
    cache = KINDS[kind](pool)
    first, second = [1, 2, 3, 4], [257, 258, 259, 260]  # equal in their low 8 bits
    a, b = pool.allocate(1), pool.allocate(1)
    keep(cache, first, a)
    assert cache.match(second).blocks == []
    keep(cache, second, b)
    assert cache.match(first).blocks == a and cache.match(second).blocks == b
    assert cache.match([1, 2, 3, 260]).blocks == [] == cache.match([9, 9, 9, 9, *first]).blocks


@pytest.mark.parametrize("kind", CACHES)
def test_least_recently_used_leaves_go_first_from_the_end(kind):
    pool = BlockPool(16, 1)
    cache = CACHES[kind](pool)
    for tokens in ([1, 2, 3], [1, 2, 4], [7, 8]):
        blocks = pool.allocate(len(tokens))
        keep(cache, tokens, blocks)
        pool.release(blocks)
    cache.unlock(lock(cache, [7, 8]))
    cache.unlock(lock(cache, [1, 2, 3]))
    assert cache.evict(1) == 1 and cache.cached_length([1, 2, 4]) == 2  # the leaf 4 is the oldest
    assert cache.evict(1) == 1 and cache.cached_length([7, 8]) == 1
    assert cache.evict(2) == 2 and cache.cached_length([7, 8]) == 0
    assert cache.cached_length([1, 2, 3]) == 2
    held = lock(cache, [1])
    assert cache.evict(10) == 1 and cache.cached_length([1, 2]) == 1
    cache.unlock(held)
    assert cache.evict(10) == 1 and pool.num_free == pool.total


@pytest.mark.parametrize("kind", CACHES)
def test_to_leave_a_path_is_to_use_it(kind):
    pool = BlockPool(8, 1)
    cache = CACHES[kind](pool)
    for token in (1, 2):
        keep(cache, [token], pool.allocate(1))
    held = lock(cache, [1])
    cache.match([2])
    cache.unlock(held)
    assert cache.evict(1) == 1 and cache.cached_length([1]) == 1 and cache.cached_length([2]) == 0


def test_decoding_grows_one_leaf_and_a_branch_splits_it():
    pool = BlockPool(16, 2)
    cache = RadixCache(pool)
    handle = lock(cache, [])
    table = []
    for end in range(2, 11, 2):
        table += pool.allocate(1)
        handle = cache.insert(list(range(end)), table, handle).handle
    (root,) = cache.snapshot()
    assert [child["n_tokens"] for child in root["children"]] == [10] and root["locks"] == 1
    assert root["children"][0]["blocks"] == table
    keep(cache, [0, 1, 2, 3, 99, 98], table[:2] + pool.allocate(1))
    (root,) = cache.snapshot()
    (stem,) = root["children"]
    assert (stem["n_tokens"], stem["locks"]) == (4, 1)
    assert sorted((child["n_tokens"], child["locks"]) for child in stem["children"]) == [(2, 0), (6, 1)]


@pytest.mark.parametrize("kind", CACHES)
def test_one_unlock_too_many_is_a_bug(kind):
    cache = CACHES[kind](BlockPool(4, 2))
    handle = lock(cache, [])
    cache.unlock(handle)
    with pytest.raises(AssertionError, match="unlocked more often than locked"):
        cache.unlock(handle)
