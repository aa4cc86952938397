"""An engine without a model: proves a schedule right by what it would have read and written.

Instead of K and V, each slot holds a fingerprint of the namespace and of all tokens up to its position, which is what
real K and V depend on. A sequence may compute a token only if every slot before it holds the right fingerprint, and may
write only into blocks that nobody else can read. The next token is a function of the last fingerprint, so that a
sequence alone has one right continuation, and every schedule must end with it.
"""

import zlib

from benchmarks.past import scheduler_class
from kv_paged import BlockPool, KVCache
from radix import PREFIX_CACHES
from scheduler import Sequence

VOCAB = 3  # small, so that prompts and answers collide often in the prefix cache


def fingerprint(before, token):
    """Not hash(): that of strings and of None differs from run to run."""
    return zlib.crc32(repr((before, token)).encode())


def next_token(mark, salt):
    return fingerprint(mark, salt) % VOCAB


def alone(tokens, namespace, salt, length):
    """The tokens a sequence ends with if nothing else exists."""
    tokens, mark = list(tokens), fingerprint("start", namespace)
    for token in tokens:
        mark = fingerprint(mark, token)
    while len(tokens) < length:
        tokens.append(next_token(mark, salt))
        mark = fingerprint(mark, tokens[-1])
    return tokens


class FakeEngine:
    def __init__(
        self, num_blocks=12, block_size=4, cache="radix", batching="continuous", reserve="paged", watermark=0, **options
    ):
        self.pool = BlockPool(num_blocks, block_size)
        self.cache = PREFIX_CACHES[cache or "none"](self.pool)
        self.scheduler = scheduler_class(batching, reserve)(self.pool, self.cache, **options)
        self.scheduler.reserve_blocks = int(watermark * self.pool.total)
        self.slots = {}  # slot -> fingerprint
        self.salt = {}  # sequence -> what makes its samples differ from its relatives'
        self.expected = {}  # sequence -> the tokens it must end with
        self.done = []
        self.marching = {}  # group -> {caught-up member: its last mark}: they decide together, as beams do
        self.widths = {}  # group -> how many members it gets once its prompt is computed

    # ---- requests

    def add(self, tokens, max_tokens, salt=0, **options):
        seq = Sequence(list(tokens), max_tokens, **options)
        self.scheduler.add(seq)
        self._expect(seq, salt)
        return seq

    def fork(self, seq, salt):
        assert not seq.num_draft
        child = self.scheduler.fork(seq)
        self._expect(child, salt)
        return child

    def _expect(self, seq, salt):
        self.salt[seq] = salt
        self.expected[seq] = alone(seq.tokens, seq.namespace, salt, self.limit(seq))

    def limit(self, seq):
        return min(seq.num_prompt + seq.max_tokens, self.scheduler.max_model_len)

    def end(self, seq, keep=False):
        self.scheduler.finish(seq, keep)
        assert seq.state == "finished" and not seq.block_table and seq.host is None
        self.expected.pop(seq, None)

    def guess(self, seq, good, k):
        """Append k guessed tokens, the first `good` of them right; never beyond the last but one token."""
        alone = seq.group not in self.marching
        if alone and seq.state == "running" and seq.num_new == 1 and not seq.num_draft:
            right = self.expected[seq][len(seq.tokens) : self.limit(seq) - 1][:k]
            seq.tokens += [token if i < good else (token + 1) % VOCAB for i, token in enumerate(right)]
            seq.num_draft = len(right)

    def march(self, tokens, max_tokens, width):
        """A prompt with `width` answers that advance only together; None if they could never all be in the pool."""
        needed = width * -(-min(len(tokens) + max_tokens, self.scheduler.max_model_len) // self.pool.block_size)
        if width > self.scheduler.max_num_seqs or needed > self.pool.total:
            return None
        seq = self.add(tokens, max_tokens)
        self.marching[seq.group], self.widths[seq.group] = {}, width
        return seq

    def rewind(self, seq, n_tokens):
        """Take decided tokens back too and go on with other samples from there."""
        self.scheduler.truncate(seq, n_tokens)
        if seq.num_new == 0:  # its next token is to be decided, but the engine only decides after computing
            mark = self.slots[self._slot(seq, n_tokens - 1)]
            seq.tokens.append(next_token(mark, self.salt[seq] + 1))
        self._expect(seq, self.salt[seq] + 1)

    # ---- steps

    def step(self, fails=False, leaves=None):
        """One step. fails: the run raises. leaves: a sequence whose client goes away while the step runs."""
        scheduler = self.scheduler
        self._march()  # a member may have left since, whom the others were waiting for
        step = scheduler.schedule()
        assert step.entries or not scheduler.has_unfinished(), "a step without progress"
        assert len({seq for seq, _ in step.entries}) == len(step.entries), "a sequence twice in one step"
        assert step.num_tokens <= scheduler.max_num_batched_tokens and len(step.entries) <= scheduler.max_num_seqs
        for victim in step.preempted:
            assert any(seq.rank >= victim.rank for seq in scheduler.running), "preempted for nobody better"
        assert all(len(blocks) == len(seq.host) for seq, blocks in step.swap_in), "swapped in, but not all of it"
        assert step.describe()
        if not fails:
            self.apply(step)
        for seq, n in step.entries:
            self._compute(seq, n, broken=fails)
        if fails:
            for seq in scheduler.fail(step):
                del self.expected[seq]
            return step
        if leaves is not None:
            self.end(leaves)
        scheduler.computed(step)
        for seq, _ in step.entries:
            if seq.state == "running":
                self._sample(seq)
        self._march()
        return step

    apply = KVCache.apply  # the real order of moves, over fingerprints

    def swap_out(self, blocks):
        return [[self.slots.get(b * self.pool.block_size + i) for i in range(self.pool.block_size)] for b in blocks]

    def swap_in(self, host, blocks):
        for b, content in zip(blocks, host, strict=False):
            self.slots |= {b * self.pool.block_size + i: mark for i, mark in enumerate(content)}

    def copy_blocks(self, pairs):
        self.swap_in(self.swap_out([source for source, _ in pairs]), [target for _, target in pairs])

    def _slot(self, seq, position):
        size = self.pool.block_size
        return seq.block_table[position // size] * size + position % size

    def _compute(self, seq, n, broken):
        assert n >= 1 and seq.state == "running"
        mark = fingerprint("start", seq.namespace)
        for position, token in enumerate(seq.tokens[: seq.num_computed + n]):
            mark = fingerprint(mark, token)
            slot = self._slot(seq, position)
            if position < seq.num_computed:
                assert broken or self.slots.get(slot) == mark, (
                    f"{seq.id} reads another sequence's K and V at {position}"
                )
            else:
                assert self.pool.refs[slot // self.pool.block_size] == 1, "written while somebody else can read it"
                self.slots[slot] = "broken" if broken else mark

    def _sample(self, seq):
        """Decide a token wherever the last known one was computed, after accepting the guesses that were right."""
        position = len(seq.tokens) - seq.num_draft - 1
        if seq.num_computed <= position:
            return
        mark = self.slots[self._slot(seq, position)]
        if seq.group in self.marching:
            self.marching[seq.group][seq] = mark
            return
        while position + 1 < seq.num_computed and seq.tokens[position + 1] == next_token(mark, self.salt[seq]):
            position += 1
            seq.num_draft -= 1
            mark = self.slots[self._slot(seq, position)]
        self.scheduler.truncate(seq, position + 1)
        self._decide(seq, mark)

    def _march(self):
        """Groups of which every member has caught up take one step together."""
        for group, ready in self.marching.items():
            members = [seq for seq in self.expected if seq.group == group]
            if members and ready and self.widths[group] > 1:  # the prompt is computed: its forks share its last row
                for salt in range(1, self.widths[group]):
                    members.append(self.fork(members[0], salt))
                    ready[members[-1]] = ready[members[0]]
                self.widths[group] = 1
            if members and ready.keys() >= set(members):
                for seq in members:
                    self._decide(seq, ready[seq])
                ready.clear()

    def _decide(self, seq, mark):
        seq.tokens.append(next_token(mark, self.salt[seq]))
        assert not seq.num_draft and seq.output == seq.tokens[seq.num_prompt :]
        if len(seq.tokens) == self.limit(seq):
            assert seq.tokens == self.expected.pop(seq), "another answer than alone"
            self.scheduler.finish(seq)
            self.done.append(seq)

    def run(self, most=5000):
        steps = 0
        while self.scheduler.has_unfinished():
            self.step()
            self.check()
            steps += 1
            assert steps < most, "no end in sight"
        assert not self.expected
        return steps

    # ---- the books, recomputed from scratch

    def check(self):
        scheduler, pool = self.scheduler, self.pool
        running = [seq for seq in scheduler.sequences.values() if seq.state == "running"]
        queued = [seq for seq in scheduler.sequences.values() if seq.state in ("waiting", "swapped")]
        assert set(running) == set(scheduler.running) and len(running) == len(scheduler.running)
        assert scheduler.waiting == sorted(queued, key=lambda seq: seq.rank)
        assert len(running) + len(queued) == len(scheduler.sequences)
        assert all(not seq.block_table and seq.handle is None for seq in queued)
        assert scheduler.running == sorted(running, key=lambda seq: seq.rank)
        owners = [0] * pool.num_blocks
        for seq in running:
            assert len(set(seq.block_table)) == len(seq.block_table) and 0 not in seq.block_table
            assert len(seq.block_table) * pool.block_size >= seq.num_computed
            for block in seq.block_table:
                owners[block] += 1
        in_use = {block for block in range(pool.num_blocks) if owners[block]}
        in_cache = check_cache(self.cache, running)
        for block in in_cache:
            owners[block] += 1
        assert owners[1:] == pool.refs[1:]
        stats = scheduler.stats()
        assert stats["free"] == owners[1:].count(0) and stats["live"] == len(in_use)
        assert stats["cached"] == len(in_cache - in_use)
        assert stats["free"] + stats["cached"] + stats["live"] == stats["total"] == pool.total
        filled = {}
        for seq in running:
            for i, block in enumerate(seq.block_table):
                held = min(pool.block_size, max(0, seq.num_computed - i * pool.block_size))
                held = pool.block_size if block in in_cache else held
                filled[block] = max(held, filled.get(block, 0))
        assert stats["kv_tokens"] == sum(filled.values())
        assert stats["swapped_blocks"] == sum(len(seq.host) for seq in queued if seq.host)

    def check_empty(self):
        """Nothing left: every block comes back once the cache is dropped."""
        self.scheduler.drop_cache()
        assert self.pool.num_free == self.pool.total
        assert self.cache.num_blocks == 0 and not self.cache.roots


def check_cache(cache, sequences):
    """Counters, keys, locks and runs of a prefix cache against a walk over all of it. Returns its blocks."""
    stands = {}
    for seq in sequences:
        node, path = seq.handle, []
        while node is not None:
            stands[node] = stands.get(node, 0) + 1
            path = node.blocks + path
            node = node.parent
        assert path == seq.block_table[: len(path)]
    blocks, evictable, nodes = set(), 0, []
    stack = list(cache.roots.values())
    while stack:
        node = stack.pop()
        nodes.append(node)
        assert node.locks == stands.get(node, 0)
        assert len(node.tokens) == len(node.blocks) * cache.block_size
        assert node.depth == len(node.blocks) + (node.parent.depth if node.parent else 0)
        assert node.parent is None or node.blocks, "an empty node"
        assert not blocks & set(node.blocks), "a block in two nodes"
        blocks |= set(node.blocks)
        evictable += 0 if node.locks else len(node.blocks)
        for child in node.children.values():
            to_the_end = [None] * node.depth * cache.block_size + child.tokens
            assert child.parent is node and cache._child(node, to_the_end) is child
            stack.append(child)
        if not node.locks and not node.children:
            assert node.queued, "an unlocked leaf that could never be evicted, or a root that nobody needs"
    assert set(stands) <= set(nodes)
    for stamp, _, node in cache._queue:  # an entry as young as its node is evicted without another look
        assert stamp != node.last_used or (node in nodes and not node.locks and not node.children)
    assert cache.num_blocks == len(blocks) and cache.num_evictable == evictable >= 0
    if hasattr(cache, "table"):
        keyed = [node for bucket in cache.table.values() for node in bucket]
        assert all(cache.table.values()) and len(keyed) == len(set(keyed))
        assert set(keyed) == {node for node in nodes if node.parent}
    return blocks
