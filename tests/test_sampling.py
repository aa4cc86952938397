"""Sampling: filters against a full sort, draws against the distribution, rows against the company they keep."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_rows import normal, shaped, state, tokens

import sampling
from sampling import (
    TICKS,
    NonFiniteLogits,
    NoTokenLeft,
    Sampled,
    SamplerState,
    SamplingParams,
    beam_score,
    beam_step,
    draw,
    probabilities,
    process_logits,
    prompt_logprobs,
    sample,
    uniform,
)

INF = math.inf


def sorted_reference(row: torch.Tensor, params: SamplingParams) -> list[int]:
    """The filters by their definitions, over a full sort and in Python's integers: ticks by id, 0 = dropped."""
    order = sorted(range(len(row)), key=lambda i: (-row[i].item(), i))
    if params.greedy:
        return [int(i == order[0]) for i in range(len(row))]
    ticks = [int(t) for t in (((row - row.max()) / params.temperature).exp() * TICKS).round().tolist()]
    kept = [i for i in order if ticks[i] >= params.min_p * TICKS]
    kept = kept[: params.top_k] if params.top_k > 0 else kept
    goal, reached, nucleus = params.top_p * sum(ticks[i] for i in kept), 0, []
    for i in kept:
        if nucleus and reached >= goal:
            break
        nucleus.append(i)
        reached += ticks[i]
    return [ticks[i] if i in set(nucleus) else 0 for i in range(len(row))]


FILTERS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0, 1e-6, 1e-5, 0.1, 0.7, 1.0, 2.0, 50.0, 1e6]),
        "top_p": st.sampled_from([1e-300, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999999]),
        "top_k": st.sampled_from([-1, 0, 1, 2, 5, 50, 10**6]),
        "min_p": st.sampled_from([1e-9, 0.05, 0.1, 0.5, 1.0]),
    },
)
# Coarse values give ties everywhere; the fine ones give none; -inf is what masks leave.
LOGITS = st.lists(
    st.one_of(st.integers(-3, 3).map(float), st.floats(-30, 30, width=32), st.sampled_from([-INF, 3e38, -3e38])),
    min_size=1,
    max_size=60,
).filter(lambda values: max(values) > -INF)


@given(LOGITS, FILTERS, st.integers(0, 2**40))
def test_filters_and_draws_equal_a_full_sort_exactly(values, fields, seed):
    row, params = torch.tensor(values), SamplingParams(**fields)
    ticks = sorted_reference(row, params)
    total = sum(ticks)
    assert probabilities(row[None], [state(**fields)])[0].tolist() == [t / total for t in ticks]
    dart, expected = uniform(seed, 0, 0) * total, 0
    while (dart := dart - ticks[expected]) >= 0:
        expected += 1
    assert tokens(sample(row[None], [state(seed=seed, **fields)])) == [expected]


@pytest.mark.parametrize("shape", ["peaked", "flat", "all equal", "two levels", "bfloat16 ties"])
def test_a_real_vocabulary_equals_a_full_sort_exactly(shape):
    row = shaped(shape)
    for fields in [{"top_p": 0.9}, {"top_k": 40, "top_p": 0.5}, {"top_k": 3000}, {"min_p": 0.02, "top_p": 0.99}]:
        params = SamplingParams(**fields)
        ticks = (((row - row.max()) / 1.0).exp() * TICKS).round().double()
        order = row.sort(descending=True, stable=True).indices
        order = order[ticks[order] >= params.min_p * TICKS]
        order = order[: params.top_k] if params.top_k else order
        reach = ticks[order].cumsum(0)
        order = order[: int((reach < params.top_p * reach[-1]).sum()) + 1]
        expected = torch.zeros(len(row), dtype=torch.float64)
        expected[order] = ticks[order] / ticks[order].sum()
        assert torch.equal(probabilities(row[None], [state(**fields)])[0], expected), fields


@pytest.mark.parametrize("seed", range(8))
def test_a_nucleus_that_ends_exactly_on_a_border_takes_no_token_more(seed):
    """top_p set to the very share of the best tokens: the first rank to reach it is the last one kept."""
    row = normal(1, 40, seed)[0]
    ticks = sorted(sorted_reference(row, SamplingParams()), reverse=True)
    for kept in range(1, 41):
        top_p = sum(ticks[:kept]) / sum(ticks)
        for fields in ({"top_p": top_p}, {"top_p": top_p, "top_k": 39}):
            expected = [t > 0 for t in sorted_reference(row, SamplingParams(**fields))]
            assert probabilities(row[None], [state(**fields)])[0].gt(0).tolist() == expected


def test_draw_never_lands_on_nothing():
    """A dart on a border belongs to the right, and the last one still hits the last token that has weight."""
    assert draw(torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]), 0.0) == 1
    assert draw(torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]), 0.5) == 3
    for seed in range(50):
        weights = torch.cat([normal(1, 30, seed)[0].abs(), torch.zeros(3)])
        assert draw(weights, 1 - 2.0**-53) == 29


@given(
    st.integers(0, 10_000), st.sampled_from([0.3, 1.0, 1.7]), st.floats(0.05, 1), st.integers(0, 30), st.floats(0, 0.5)
)
def test_probabilities_are_the_textbook_softmax_filters(seed, temperature, top_p, top_k, min_p):
    """In float64 without ticks: agreement to what half a tick per token can move."""
    row = normal(1, 50, seed)[0]
    p = torch.softmax(row.double() / temperature, 0)
    p[p < min_p * p.max()] = 0
    if top_k:
        p[p < p.sort(descending=True).values[top_k - 1]] = 0
    ordered, ids = (p / p.sum()).sort(descending=True)
    p[ids[1:][ordered.cumsum(0)[:-1] >= top_p]] = 0
    got = probabilities(row[None], [state(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)])[0]
    torch.testing.assert_close(got, p / p.sum(), rtol=2e-5, atol=1e-9)


def chi_square_bound(freedom: int, z: float = 3.7) -> float:
    """Wilson and Hilferty's approximation of the quantile at z standard deviations (1 in 10,000)."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.0, "top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.15},
        {
            "temperature": 1.3,
            "min_p": 0.02,
            "top_k": 7,
            "top_p": 0.93,
            "repetition_penalty": 1.4,
            "presence_penalty": 0.5,
        },
    ],
)
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_draws_follow_the_distribution(fields, vary):
    """Chi-square over a vocabulary of 9, the darts taken over many seeds at one position, or along one request."""
    row, draws = torch.tensor([[2.0, 0.5, 1.0, -1.0, 0.0, 1.5, -3.0, 0.7, 1.0]]), 1200
    seen = state([0, 1], [1, 3, 3], **fields)
    processed = process_logits(row, [seen])
    exact = probabilities(processed, [seen])[0]
    # Penalties are applied once, so that each draw starts from the same row.
    plain = {name: value for name, value in fields.items() if "penalty" not in name}
    if vary == "seed":
        counts = Counter(sample(processed, [state(seed=seed, **plain)])[0].token for seed in range(draws))
    else:
        walker, counts = state(seed=7, **plain), Counter()
        for _ in range(draws):
            token = sample(processed, [walker])[0].token
            counts[token] += 1
            walker.commit(token)
    support = exact.nonzero().squeeze(1).tolist()
    assert set(counts) <= set(support)
    statistic = sum((counts[i] - draws * float(exact[i])) ** 2 / (draws * float(exact[i])) for i in support)
    assert statistic < chi_square_bound(len(support) - 1)


@pytest.mark.parametrize("axis", range(4))
def test_uniform_is_uniform_along_each_argument(axis):
    numbers = []
    for i in range(4000):
        arguments = [123, 0, 5, 0]
        arguments[axis] += i
        numbers.append(uniform(*arguments))
    assert all(0 <= u < 1 for u in numbers)
    counts = Counter(int(u * 20) for u in numbers)
    assert sum((counts[b] - 200) ** 2 / 200 for b in range(20)) < chi_square_bound(19)
    serial = sum((a - 0.5) * (b - 0.5) for a, b in zip(numbers, numbers[1:], strict=False)) / len(numbers) * 12
    assert abs(serial) < 4 / math.sqrt(len(numbers))


def test_uniform_takes_any_seed():
    seeds = [0, -1, -(2**63), 2**63 - 1, 2**64 - 1]
    assert len({uniform(seed, 0, 0) for seed in seeds}) == len(seeds) - 1  # -1 and 2**64 - 1 are the same 64 bits


COMPANY = [  # what may stand in one batch: every kind of row
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0, "repetition_penalty": 1.5},
    {},
    {"temperature": 0.7, "top_k": 20, "logprobs": 0},
    {"top_p": 0.9, "frequency_penalty": 1.0},
    {"min_p": 0.1, "logit_bias": {"5": 3, "7": -100}},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.8, "min_tokens": 9, "best_of": 2},
]


def company(vocab: int, broken: bool = False) -> tuple[torch.Tensor, list[SamplerState], list]:
    rows = normal(len(COMPANY), vocab, seed=3)
    if broken:
        rows[3, 11] = math.nan
    states = [state([1, 2, 3], [3, 4, i], seed=i, eos=[2], **fields) for i, fields in enumerate(COMPANY)]
    masks = [None if i % 3 else torch.arange(vocab - 5) % 2 == 0 for i in range(len(COMPANY))]
    return rows, states, masks


@given(st.lists(st.integers(0, len(COMPANY) - 1), min_size=1, max_size=12), st.sampled_from([320, 331]), st.booleans())
def test_a_row_is_bit_identical_in_any_batch(members, vocab, broken):
    rows, states, masks = company(vocab, broken)
    alone = [sample(rows[i : i + 1], [states[i]], [masks[i]])[0] for i in members]
    batch = sample(rows[members], [states[i] for i in members], [masks[i] for i in members])
    strided = rows[members].t().contiguous().t()  # the same values, other strides
    before = repr(rows.tolist())
    chosen = sample(rows, [states[i] for i in members], [masks[i] for i in members], members)  # of a larger table
    assert list(map(repr, batch)) == list(map(repr, alone)) == list(map(repr, chosen))
    assert repr(rows.tolist()) == before, "the rows of others, and those drawn from, stay as they are"
    assert list(map(repr, sample(strided, [states[i] for i in members], [masks[i] for i in members]))) == list(
        map(repr, alone)
    )
    if not broken:
        processed = process_logits(rows[members], [states[i] for i in members], [masks[i] for i in members])
        together = probabilities(processed, [states[i] for i in members])
        for r, i in enumerate(members):
            assert torch.equal(together[r], probabilities(processed[r : r + 1], [states[i]])[0])


def test_a_row_is_bit_identical_in_any_batch_at_full_size():
    rows, states, masks = company(49_152)
    alone = [sample(rows[i : i + 1], [states[i]], [masks[i]])[0] for i in range(len(rows))]
    for order in (list(range(8)), [5, 3, 6], [7, 6, 5, 4, 3, 2, 1, 0]):
        pick = [states[i] for i in order], [masks[i] for i in order]
        assert sample(rows[order], *pick) == [alone[i] for i in order]


@pytest.mark.parametrize("vocab", [1, 2, 7, 255, 256, 257, 320, 1000, 49_152, 50_257])
def test_argmax_is_torchs_and_takes_the_lowest_id(vocab):
    rows = normal(5, vocab).round()  # rounding makes ties
    rows[4] = -1.0
    rows[3, vocab // 2] = float("nan")
    best, ids = sampling.argmax(rows)
    assert ids[:3] == rows[:3].argmax(-1).tolist() and best[:3] == rows[:3].amax(-1).tolist()
    assert ids[4] == 0 and best[4] == -1.0 and math.isnan(best[3])
    some = [4, 0, 0, 2]
    assert sampling.argmax(rows, some) == ([best[r] for r in some], [ids[r] for r in some])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_and_the_callers_tensor_stay_as_they_are(dtype):
    rows = normal(2, 40).to(dtype)
    before = rows.clone()
    first = sample(rows, [state(temperature=0, logit_bias={3: 50}), state(repetition_penalty=2, prompt=[1])])
    assert torch.equal(rows, before) and rows.dtype == dtype
    assert first == sample(
        rows.float(), [state(temperature=0, logit_bias={3: 50}), state(repetition_penalty=2, prompt=[1])]
    )
    plain = rows.float()
    process_logits(plain, [state(logit_bias={1: 1}), state()])
    assert torch.equal(plain, before.float())


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1e6},
        {"temperature": 1e-5},
        {"repetition_penalty": 1e-4},
        {"repetition_penalty": 1e4},
        {"top_p": 1e-300},
    ],
)
def test_extremes_neither_overflow_nor_lose_every_token(fields):
    rows = torch.tensor([[3e38, -3e38, 0.0, -INF], [1e-38, -1e-38, 0.0, -INF], [-3e38, -3e38, -INF, -INF]])
    states = [state([0, 1], [1, 2, 3], seed=5, **fields) for _ in rows]
    p = probabilities(process_logits(rows, states), states)
    assert torch.isfinite(p).all() and torch.allclose(p.sum(-1), torch.ones(3, dtype=torch.float64))
    assert p[:, 3].eq(0).all() and all(isinstance(result, Sampled) for result in sample(rows, states))


# Greedy, seeds, broken rows


def test_F17_greedy_rows_are_argmax_beside_drawn_ones():
    rows = normal(6, 500).round()  # ties: the lowest id, also for top_k=1
    kinds = [
        {"temperature": 0},
        {"temperature": 1e-6},
        {"temperature": 0.8},
        {"top_k": 1},
        {"min_p": 1},
        {"top_p": 1e-9},
    ]
    got = tokens(sample(rows, [state(**fields) for fields in kinds]))
    best = rows.argmax(-1).tolist()
    assert [got[i] for i in (0, 1, 3, 4, 5)] == [best[i] for i in (0, 1, 3, 4, 5)]
    one_hot = probabilities(rows[:2], [state(temperature=0), state(top_k=1)])
    assert one_hot.argmax(-1).tolist() == best[:2] and one_hot.sum().item() == 2


def test_F18_min_p_compares_probabilities():
    rows = torch.tensor([[2.0, 1.0, 0.0, -9.0], [0.0, 2.0, -9.0, 1.0]])
    p = probabilities(rows, [state(min_p=0.1), state(min_p=0.1)])
    kept = torch.softmax(torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64), 0)  # 0.665, 0.245, 0.090 >= 0.0665
    torch.testing.assert_close(p[0], torch.tensor([*kept, 0.0], dtype=torch.float64), rtol=0, atol=1e-7)
    torch.testing.assert_close(
        p[1], torch.tensor([kept[2], kept[0], 0.0, kept[1]], dtype=torch.float64), rtol=0, atol=1e-7
    )
    assert probabilities(rows, [state(min_p=0.14)] * 2).count_nonzero(-1).tolist() == [2, 2]  # e**-2 = 0.135
    assert probabilities(rows, [state(min_p=1)] * 2).argmax(-1).tolist() == [0, 1]


def test_F20_choices_of_one_seed_differ_and_reproduce():
    row = normal(1, 300, spread=1.0)

    def run(seed, choice):
        walker = state(seed=99, choice=choice, **({} if seed is None else {"params_seed": seed}))
        out = []
        for _ in range(12):
            out.append(sample(row, [walker])[0].token)
            walker.commit(out[-1])
        return out

    def state(seed, choice, params_seed=None):
        return SamplerState(SamplingParams(n=3, seed=params_seed), [1, 2], choice=choice, seed=seed)

    first = [run(1, choice) for choice in range(3)]
    assert first == [run(1, choice) for choice in range(3)]
    assert len(set(map(tuple, first))) == 3
    assert run(2, 0) != run(1, 0)
    assert run(None, 0) == run(None, 0) != run(1, 0)  # the engine's seed stands in
    assert run(0, 0) != run(None, 0)  # seed 0 is a seed


def test_F20_a_fork_takes_its_own_index_and_goes_on_from_the_same_place():
    row, trunk = normal(1, 300, spread=1.0), state([1], [2, 3], seed=5)
    assert tokens(sample(row, [trunk.fork(4)])) == tokens(sample(row, [state([1], [2, 3], seed=5, choice=4)]))
    assert len({sample(row, [trunk.fork(choice)])[0].token for choice in range(20)}) > 10


def test_unseeded_requests_differ():
    row, params = torch.zeros(1, 10_000), SamplingParams()
    assert len({sample(row, [SamplerState(params, [])])[0].token for _ in range(8)}) > 1


@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"temperature": 0, "logit_bias": {0: 5}}, {"logprobs": 2}])
@pytest.mark.parametrize("poison", [math.nan, INF, -INF])
def test_F21_a_row_that_is_not_finite_is_an_error_and_its_neighbours_go_on(poison, fields):
    rows = normal(3, 512)
    rows[1, :] = poison if poison == -INF else rows[1]
    rows[1, 300] = poison
    states = [state([1], [2], seed=i, **fields) for i in range(3)]
    got = sample(rows, states, [torch.arange(512) < 100] * 3)  # also when the mask would hide the bad entry
    assert isinstance(got[1], NonFiniteLogits) and "bfloat16 or float32" in str(got[1])
    clean = normal(3, 512)
    assert [got[0], got[2]] == sample(clean[[0, 2]], [states[0], states[2]], [torch.arange(512) < 100] * 2)
    assert isinstance(prompt_logprobs(rows, [0, 0, 0], 1)[1], NonFiniteLogits)
    with pytest.raises(NoTokenLeft if poison == -INF else NonFiniteLogits):  # masks write -inf too
        probabilities(rows, states)


# Log-probabilities


@given(st.integers(0, 1000), st.integers(0, 20), st.booleans())
def test_logprobs_are_the_raw_log_softmax(seed, k, ties):
    row = normal(1, 100, seed)
    row = row.round() if ties else row
    exact = torch.log_softmax(row[0].double(), 0)
    fields = {"temperature": 0.5, "top_k": 30, "logit_bias": {4: 20}, "repetition_penalty": 3, "logprobs": k}
    got = sample(row, [state([1, 2], [3], seed=seed, **fields)])[0]
    order = sorted(range(100), key=lambda i: (-row[0, i].item(), i))
    assert [i for i, _ in got.top] == order[:k]
    assert got.rank == order.index(got.token) + 1
    assert got.logprob == pytest.approx(float(exact[got.token]), abs=1e-5)
    assert [value for _, value in got.top] == pytest.approx([float(exact[i]) for i in order[:k]], abs=1e-5)
    if got.rank <= k:
        assert got.top[got.rank - 1] == (got.token, got.logprob)


def test_logprobs_cost_nothing_unless_asked_for():
    row = normal(1, 50)
    assert sample(row, [state(temperature=0)])[0] == Sampled(int(row.argmax()))
    assert sample(row, [state(best_of=2)])[0].logprob is not None and sample(row, [state(best_of=2)])[0].top is None
    assert sample(row, [state(logprobs=0)])[0].top == []


@given(st.lists(st.integers(1, 9), min_size=1, max_size=10))
def test_F24_prompt_logprobs_do_not_depend_on_chunks(chunks):
    n = sum(chunks)
    logits, targets = normal(n, 131), [(7 * i) % 131 for i in range(n)]
    whole, pieces, start = prompt_logprobs(logits, targets, 3), [], 0
    for size in chunks:
        pieces += prompt_logprobs(logits[start : start + size], targets[start : start + size], 3)
        start += size
    assert pieces == whole
    exact = torch.log_softmax(logits.double(), -1)[range(n), targets]
    assert [scored.logprob for scored in whole] == pytest.approx(exact.tolist(), abs=1e-5)
    assert [scored.token for scored in whole] == targets


def test_an_impossible_prompt_token_has_log_probability_minus_infinity():
    scored = prompt_logprobs(torch.tensor([[0.0, -INF, 0.0]]), [1], 2)[0]
    assert scored.logprob == -INF and scored.rank == 3 and [i for i, _ in scored.top] == [0, 2]


# Beams


@given(st.integers(1, 5), st.integers(1, 12), st.integers(1, 12), st.integers(0, 1000), st.booleans())
def test_beam_step_is_brute_force(beams, vocab, n, seed, ties):
    logits = normal(beams, vocab, seed)
    logprobs = logits.round() if ties else torch.log_softmax(logits, -1)
    logprobs[seed % beams, 0] = -INF
    scores = [-float(b % 2) for b in range(beams)]
    every = [(b, v, scores[b] + logprobs[b, v].item()) for b in range(beams) for v in range(vocab)]
    expected = sorted((c for c in every if c[2] > -INF), key=lambda c: (-c[2], c[0], c[1]))[:n]
    assert beam_step(logprobs, scores, n) == expected


def test_beam_score_divides_by_a_power_of_the_length():
    assert beam_score(-6.0, 3) == -2.0 and beam_score(-6.0, 3, 0.0) == -6.0 and beam_score(0.0, 0) == 0.0


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {}, {"top_k": 40}, {"top_p": 0.95}, {"min_p": 0.1, "top_p": 0.9}, {"logprobs": 20}]
)
def test_no_filter_sorts_the_vocabulary(fields, monkeypatch):
    sorted_sizes, plain = [0], torch.Tensor.sort

    def counting(self, *args, **kwargs):
        sorted_sizes.append(len(self))
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "sort", counting)
    sample(normal(4, 49_152), [state(seed=seed, **fields) for seed in range(4)])
    assert max(sorted_sizes) < 1000
