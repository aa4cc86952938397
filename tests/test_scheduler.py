"""The scheduler against a fake engine that sees every read and write: nothing lost, nothing doubled, nothing stale."""

import random

import pytest
from fake_engine import FakeEngine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

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
    "max_swap_blocks": [None, 0, 3],
}
CONFIGS = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in CHOICES.items()})


def engine_for(config):
    held = (config["num_blocks"] - 1) * config["block_size"]
    config = config | {"max_model_len": max(2, min(held + 1, 24))}
    if not config["chunked"]:
        config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], config["max_model_len"])
    if config["reserve"] == "contiguous":
        config["cache"] = None
    return FakeEngine(**config)


REQUESTS = st.fixed_dictionaries(
    {
        "tokens": st.lists(st.integers(0, 2), min_size=1, max_size=20),
        "max_tokens": st.integers(1, 20),
        "priority": st.integers(0, 2),
        "namespace": st.sampled_from([None, None, ("lora", "x"), ("salt", "x")]),
        "read_cache": st.sampled_from([True, True, True, False]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=CONFIGS, requests=st.lists(REQUESTS, min_size=3, max_size=6))
    def start(self, config, requests):
        self.engine = engine_for(config)
        for request in requests:
            self.add(request)

    def add(self, request):
        tokens = request["tokens"][: self.engine.scheduler.max_model_len - 1]
        self.engine.add(**request | {"tokens": tokens})

    def pick(self, data):
        """Some live sequence without guesses; None if there is none."""
        live = [seq for seq in self.engine.expected if not seq.num_draft]
        return data.draw(st.sampled_from(live)) if live else None

    @rule(request=REQUESTS)
    def arrive(self, request):
        if len(self.engine.expected) < 8:
            self.add(request)

    @rule(request=REQUESTS, width=st.integers(2, 4))
    def beams_arrive(self, request, width):
        if len(self.engine.expected) < 8:
            tokens = request["tokens"][: self.engine.scheduler.max_model_len - 1]
            self.engine.march(tokens, request["max_tokens"], width)

    @rule(data=st.data(), request=REQUESTS)
    def next_turn(self, data, request):
        """A conversation goes on: the prompt is what an earlier sequence ended with, and more."""
        if self.engine.done:
            earlier = data.draw(st.sampled_from(self.engine.done))
            self.add(request | {"tokens": earlier.tokens + request["tokens"][:3], "namespace": earlier.namespace})

    @rule(times=st.integers(1, 8))
    def steps(self, times):
        for _ in range(times):
            self.engine.step()
            self.engine.check()

    @rule(guesses=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=8, max_size=8))
    def guess_and_step(self, guesses):
        for seq, (good, k) in zip(list(self.engine.expected), guesses, strict=False):
            self.engine.guess(seq, good, k)
        self.engine.step()

    @rule(data=st.data(), salt=st.integers(1, 5))
    def fork(self, data, salt):
        if len(self.engine.expected) < 8 and (seq := self.pick(data)) and seq.group not in self.engine.marching:
            self.engine.fork(seq, salt)

    @rule(data=st.data(), keep=st.floats(0, 1))
    def rewind(self, data, keep):
        """Take back decided tokens too, down to the prompt: goes back into cached and shared blocks."""
        seq = self.pick(data)
        if seq and seq.state == "running" and seq.num_new == 1 and len(seq.tokens) > seq.num_prompt:
            self.engine.rewind(seq, seq.num_prompt + int(keep * (len(seq.tokens) - 1 - seq.num_prompt)))

    @rule(data=st.data(), how=st.sampled_from(["abort", "abort id", "finish", "twice", "fail", "leave", "drop cache"]))
    def disturb(self, data, how):
        scheduler = self.engine.scheduler
        if how == "fail" and scheduler.has_unfinished():
            self.engine.step(fails=True)
        elif how == "drop cache":
            scheduler.drop_cache()
            assert scheduler.stats()["cached"] == 0
        elif how == "twice":
            for seq in self.engine.done:
                scheduler.abort(seq)
                scheduler.finish(seq)
            scheduler.abort("nobody")
        elif how == "leave" and (seq := self.pick(data)):
            self.engine.step(leaves=seq)
        elif seq := self.pick(data):
            self.engine.end(seq, scheduler.finish if how == "finish" else scheduler.abort, by_id=how == "abort id")

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
    config = {name: rng.choice(values) for name, values in CHOICES.items()}
    engine = engine_for(config)
    scheduler = engine.scheduler
    stems = [[rng.randrange(2) for _ in range(rng.randint(1, 16))] for _ in range(3)]
    for _ in range(120):
        live = [seq for seq in engine.expected if not seq.num_draft]
        free = [seq for seq in live if seq.group not in engine.marching]  # of forks: those that go their own way
        running = [seq for seq in free if seq.state == "running" and seq.num_new == 1]
        draw = rng.random()
        if draw < 0.23 and len(engine.expected) < 10:
            stem = rng.choice(stems) if not engine.done or rng.random() < 0.7 else rng.choice(engine.done).tokens
            tokens = (stem + [rng.randrange(2) for _ in range(rng.randint(0, 6))])[: scheduler.max_model_len - 1]
            namespace = rng.choice([None, None, None, ("lora", "x"), ("salt", "x")])
            engine.add(
                tokens,
                rng.randint(1, 20),
                priority=rng.randrange(3),
                namespace=namespace,
                read_cache=rng.random() < 0.9,
            )
        elif draw < 0.27 and len(engine.expected) < 8:
            stem = rng.choice(stems)[: scheduler.max_model_len - 1]
            engine.march(stem, rng.randint(1, 12), rng.randint(2, 4))
        elif draw < 0.31 and free and len(engine.expected) < 10:
            engine.fork(rng.choice(running or free), rng.randrange(1, 6))
        elif draw < 0.33 and running and (seq := rng.choice(running)) and len(seq.tokens) > seq.num_prompt:
            engine.rewind(seq, rng.randint(seq.num_prompt, len(seq.tokens) - 1))
        elif draw < 0.36 and live:
            engine.end(rng.choice(live), rng.choice([scheduler.abort, scheduler.finish]), by_id=False)
        elif draw < 0.37 and live:
            engine.step(fails=True)
        elif draw < 0.38:
            scheduler.drop_cache()
        elif draw < 0.40 and live:
            engine.step(leaves=rng.choice(live))
        else:
            for seq in running:
                if rng.random() < 0.4:
                    engine.guess(seq, rng.randint(0, 3), rng.randint(1, 3))
            engine.step()
        engine.check()
    engine.run()
    engine.check_empty()
