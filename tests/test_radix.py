"""Both prefix caches against a dictionary from whole prefixes to blocks."""

import random

import pytest
from fake_engine import check_cache
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kv_paged import BlockPool, OutOfBlocks
from radix import PREFIX_CACHES, HashCache, RadixCache


def lock(cache, tokens, namespace=None):
    handle = cache.match(tokens, namespace).handle
    cache.lock(handle)
    return handle


def keep(cache, tokens, blocks, namespace=None):
    """What a sequence does that computed all of its tokens and ends."""
    cache.unlock(cache.insert(tokens, blocks, lock(cache, [], namespace)).handle)


class Holder:
    """A sequence, as far as the cache can tell: it stands at a handle and owns the blocks up to there."""

    def __init__(self, handle, blocks, namespace, tokens):
        self.handle, self.block_table, self.namespace, self.tokens = handle, blocks, namespace, tokens


class Model:
    """Drives a cache and a dictionary (namespace, prefix) -> block side by side."""

    def __init__(self, kind, block_size, num_blocks, **options):
        self.pool = BlockPool(num_blocks, block_size)
        self.cache = kind(self.pool, **options)
        self.known, self.holders, self.size = {}, [], block_size

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
        assert (
            match.blocks == expected and match.n_tokens == len(expected) * self.size == match.handle.depth * self.size
        )
        if hold:
            self.cache.lock(match.handle)
            self.pool.share(match.blocks)
            self.holders.append(Holder(match.handle, match.blocks, namespace, tokens[: match.n_tokens]))
        return match

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
        whole = self.expected(tokens, namespace)
        assert len(whole) == n and match.blocks == whole[start:]
        if holder:
            self.pool.share(match.blocks)
            holder.handle, holder.block_table, holder.tokens = match.handle, whole, tokens[: n * self.size]
        else:
            self.cache.unlock(match.handle)
        self.pool.release(own)

    def shorten(self, holder, depth):
        self.pool.release(holder.block_table[depth:])
        del holder.block_table[depth:], holder.tokens[depth * self.size :]
        holder.handle = self.cache.retreat(holder.handle, depth)

    def withdraw(self, holder):
        prefix = (holder.namespace, tuple(holder.tokens))
        alone = (
            sum(
                h.tokens[: len(holder.tokens)] == holder.tokens and h.namespace == holder.namespace
                for h in self.holders
            )
            == 1
        )
        last = not any(
            ns == prefix[0] and len(p) > len(prefix[1]) and p[: len(prefix[1])] == prefix[1] for ns, p in self.known
        )
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
        assert freed == min(n, len(possible)) and self.pool.num_free == free + freed
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


TOKENS = st.lists(st.integers(0, 1), max_size=14)
NAMESPACES = st.sampled_from([None, ("lora", "x"), ("salt", "x")])


class CacheMachine(RuleBasedStateMachine):
    @initialize(kind=st.sampled_from(["radix", "hash", "same hash"]), size=st.sampled_from([1, 2, 4]))
    def start(self, kind, size):
        if kind == "same hash":
            self.model = Model(HashCache, size, 20, hash_function=lambda key: 7)
        else:
            self.model = Model(PREFIX_CACHES[kind], size, 20)

    @rule(tokens=TOKENS, namespace=NAMESPACES, limit=st.none() | st.integers(0, 14), hold=st.booleans())
    def match(self, tokens, namespace, limit, hold):
        self.model.match(tokens, namespace, limit, hold)

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def insert(self, tokens, namespace):
        self.model.insert(tokens, namespace)

    @rule(
        data=st.data(), more=TOKENS, action=st.sampled_from(["go on", "go on", "fork", "shorten", "withdraw", "leave"])
    )
    def hold(self, data, more, action):
        if not self.model.holders:
            return
        holder = data.draw(st.sampled_from(self.model.holders))
        if action == "go on":
            self.model.insert(holder.tokens + more, holder.namespace, holder)
        elif action == "fork":
            self.model.match(holder.tokens, holder.namespace, hold=True)
        elif action == "shorten":
            self.model.shorten(holder, data.draw(st.integers(0, len(holder.block_table))))
        elif action == "withdraw":
            self.model.withdraw(holder)
        else:
            self.model.leave(holder)

    @rule(n=st.integers(0, 5))
    def evict(self, n):
        self.model.evict(n)

    @invariant()
    def books_balance(self):
        if hasattr(self, "model"):
            self.model.check()

    def teardown(self):
        if hasattr(self, "model"):
            for holder in list(self.model.holders):
                self.model.leave(holder)
            self.model.evict(100)
            assert self.model.pool.num_free == self.model.pool.total and not self.model.cache.roots


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(stateful_step_count=40)


@pytest.mark.parametrize("kind", ["radix", "hash"])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("seed", [0, 1])
def test_F40_2000_operations_keep_every_counter_right(kind, size, seed):
    rng = random.Random(seed)
    model = Model(PREFIX_CACHES[kind], size, 60)
    for _ in range(2000):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(6 * size + 3))]  # mostly not whole blocks
        holder = rng.choice(model.holders) if model.holders else None
        draw = rng.random()
        if draw < 0.25:
            model.match(tokens, None, hold=len(model.holders) < 8)
        elif draw < 0.45:
            model.insert(tokens, None)
        elif draw < 0.60 and holder:
            model.insert(holder.tokens + tokens, None, holder)
        elif draw < 0.68 and holder:
            model.shorten(holder, rng.randint(0, len(holder.block_table)))
        elif draw < 0.72 and holder:
            model.withdraw(holder)
        elif draw < 0.85 and holder:
            model.leave(holder)
        else:
            model.evict(rng.randint(1, 6))
        model.check()


@pytest.mark.parametrize("kind", PREFIX_CACHES)
@pytest.mark.parametrize("length", [7, 8, 9])
def test_F36_a_limit_leaves_a_token_to_compute(kind, length):
    pool = BlockPool(8, 4)
    cache = PREFIX_CACHES[kind](pool)
    tokens = list(range(length))
    blocks = pool.allocate(length // 4)
    keep(cache, tokens, blocks)
    match = cache.match(tokens, None, length - 1)
    assert match.n_tokens == (length - 1) // 4 * 4 < length
    assert match.blocks == blocks[: match.n_tokens // 4]


@pytest.mark.parametrize("make", [RadixCache, HashCache, lambda pool: HashCache(pool, lambda key: 0)])
def test_F37_equal_hashes_and_equal_low_bits_are_not_equal_tokens(make):
    pool = BlockPool(16, 4)
    cache = make(pool)
    first, second = [1, 2, 3, 4], [257, 258, 259, 260]  # equal in their low 8 bits
    a, b = pool.allocate(1), pool.allocate(1)
    keep(cache, first, a)
    assert cache.match(second).blocks == []
    keep(cache, second, b)
    assert cache.match(first).blocks == a and cache.match(second).blocks == b
    assert cache.match([1, 2, 3, 260]).blocks == []


@pytest.mark.parametrize("make", [RadixCache, HashCache, lambda pool: HashCache(pool, lambda key: 0)])
def test_F38_adapter_salt_and_plain_are_three_caches(make):
    pool = BlockPool(16, 2)
    cache = make(pool)
    spaces = [None, ("lora", "X"), ("salt", "X"), "X"]
    own = {}
    for space in spaces:
        assert cache.match([5, 6, 7, 8], space).blocks == []
        own[space] = pool.allocate(2)
        keep(cache, [5, 6, 7, 8], own[space], space)
    for space in spaces:
        assert cache.match([5, 6, 7, 8], space).blocks == own[space]
    assert cache.match([7, 8]).blocks == [], "the same block after another prefix"
    assert cache.match([1, 2, 7, 8]).blocks == []


@pytest.mark.parametrize("make", [RadixCache, HashCache, lambda pool: HashCache(pool, lambda key: 0)])
def test_F39_no_key_outlives_its_block(make):
    pool = BlockPool(4, 2)  # three blocks
    cache = make(pool)

    def run(tokens):
        """What a sequence does: take what is cached, evict for the rest, leave all of it behind."""
        match = cache.match(tokens)
        cache.lock(match.handle)
        missing = len(tokens) // 2 - len(match.blocks)
        cache.evict(max(0, missing - pool.num_free))
        new = pool.allocate(missing)
        cache.unlock(cache.insert(tokens, match.blocks + new, match.handle).handle)
        pool.release(new)
        return match.n_tokens

    a, b = [1, 2, 3, 4, 5, 6], [9, 9, 8, 8, 7, 7]
    assert run(a) == 0 and run(a) == 6
    assert run(b) == 0, "B overwrites all three blocks"
    assert cache.cached_length(a) == 0 and run(a) == 0
    assert cache.num_blocks == 3
    check_cache(cache, [])


@pytest.mark.parametrize("kind", PREFIX_CACHES)
def test_least_recently_used_leaves_go_first_from_the_end(kind):
    pool = BlockPool(16, 1)
    cache = PREFIX_CACHES[kind](pool)
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


@pytest.mark.parametrize("kind", PREFIX_CACHES)
def test_one_unlock_too_many_is_a_bug(kind):
    cache = PREFIX_CACHES[kind](BlockPool(4, 2))
    handle = lock(cache, [])
    cache.unlock(handle)
    with pytest.raises(AssertionError, match="unlocked more often than locked"):
        cache.unlock(handle)
