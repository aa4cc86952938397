"""Sampling: parameters by their table, filters against a full sort, draws against their distribution, rows in company.

A rule that is put into RULES must be in force everywhere, and the native draw must step aside for one it does not know.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from types import SimpleNamespace

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_rows import FILTERS, FILTERS_AT_SIZE, SHAPES, constrained, normal, state, tokens

import kernels
import sampling
from formats import fields as fields_module
from sampling import ParameterError, Rule, Sampled, SamplerState, SamplingParams, probabilities, sample
from speculative import verdict

NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def backend(request):
    before, threads = kernels.backend(), kernels.threads()
    kernels.set_threads(2)
    yield kernels.set_backend(request.param)
    kernels.set_backend(before)
    kernels.set_threads(threads)


BACKENDS = pytest.mark.parametrize("backend", ["reference", "native"], indirect=True)

# SamplingParams

NO_NUMBER = ["1", b"1", [1], {}, True, False, 1 + 0j, NAN, INF, -INF]  # what no number field takes
NUMBERS = {  # field: (legal, illegal beside NO_NUMBER)
    "temperature": ([0, 1, 0.7, 1e-9, 2.5, 1e6], [None, -0.1, -1, 1e7, 10**400]),
    "top_p": ([1, 1.0, 0.5, 1e-300], [None, 0, -0.1, 1.0001, 2]),
    "typical_p": ([1, 1.0, 0.5, 1e-300], [None, 0, -0.1, 1.0001, 2]),
    "min_p": ([0, 0.05, 1], [None, -0.01, 1.01]),
    "presence_penalty": ([-2, 0, 0.5, 2], [None, -2.1, 2.1, 10**400]),
    "frequency_penalty": ([-2, 0, 0.5, 2], [None, -2.1, 2.1]),
    "repetition_penalty": ([1, 0.5, 1.3, 100], [None, 0, -1, 1e-300, 1e300]),
    "n": ([1, 3, 128], [None, 0, -1, 129, 100_000, 1.0, 1.5]),
    "best_of": ([None, 1, 128], [0, -1, 129, 2.0]),
    "beam_width": ([None, 1, 64], [0, -1, 65, 2.0]),
    "top_k": ([-1, 0, 1, 10**6], [None, -2, 1.5, 40.0]),
    "max_tokens": ([None, 0, 1, 10**6], [-1, -5, 1.5, 256.0]),
    "min_tokens": ([0, 1, 16], [None, -1, 0.5]),
    "seed": ([None, 0, 1, -1, 2**63 - 1, -(2**63)], [2**63, -(2**63) - 1, 1.0, 10**5000]),
    "logprobs": ([None, 0, 20], [-1, 21, 100_000, 1.0]),
    "prompt_logprobs": ([None, 0, 20], [-1, 21, 100_000, 1.0]),
}
HALF = "a\udc00"  # a lone surrogate, which no UTF-8 holds
TEXTS = ([None, "a+", "\U0001f600"], ["", 1, True, b"a", ["a"], HALF])
DEEP = functools.reduce(lambda schema, _: {"items": schema}, range(20_000), {})
SWITCHES = ([True, False], [None, 0, 1, "yes"])
FIELDS = {field: (legal, [*NO_NUMBER, *illegal]) for field, (legal, illegal) in NUMBERS.items()} | {
    "ignore_eos": SWITCHES,
    "include_stop_str_in_output": SWITCHES,
    "stop": (
        [None, "x", [], (), ["a", "b"], ("a",)],
        ["", [""], ["a", ""], 0, False, {}, b"x", [b"x"], [None], [1], ["a", 1], HALF, ["a", "\ud83d"]],
    ),
    "stop_token_ids": ([None, [], [0, 5], (7,)], ["5", 5, [-1], [True], ["5"], [1.0], [None], {}, {5: 1}, 0]),
    "logit_bias": (
        [None, {}, {5: 1}, {"5": -100, 6: 100.0}, {"007": 0}],
        [[], "x", 0, {"AI": -100}, {"-1": 1}, {-1: 1}, {"": 1}, {"1.0": 1}, {1.0: 1}, {True: 1}, {None: 1}, {"+5": 1}]
        + [{" 5": 1}, {"1_0": 1}, {"٣": 1}, {"9" * 5000: 1}, {5: 1, "5": 2}, {5: 101}, {5: -100.5}]
        + [{5: value} for value in ["1", None, True, [1], NAN, INF, -INF, 10**400]],
    ),
    "regex": TEXTS,
    "grammar": TEXTS,
    "json_schema": (
        [None, {}, {"type": "object"}, '{"type": "string"}'],
        ["", "{", "[]", "true", 1, True, [], b"{}", DEEP, '{"items": ' * 200_000 + "{}" + "}" * 200_000]
        + [{"const": HALF}, {HALF: 1}, {"enum": [{"x": [HALF]}]}, '{"const": "\\ud800"}', {"a": {1, 2}}, {"a": b"x"}],
    ),
    "choice": (
        [None, ["yes", "no"], ("a",)],
        [[], (), "yes", [""], ["a", ""], [1], [None], {}, 0, False, {"a": 1}, [HALF]],
    ),
}


def cases(which: int) -> list:
    return [pytest.param(f, v, id=f"{f}-{i}") for f, pair in FIELDS.items() for i, v in enumerate(pair[which])]


def test_every_field_has_cases_a_kind_and_a_help_text():
    fields = dataclasses.fields(SamplingParams)
    assert set(FIELDS) == {field.name for field in fields}
    assert {field.metadata["kind"] for field in fields} == {"real", "integer", *fields_module.ALLOWED}
    assert all(len(field.metadata["help"]) > 20 for field in fields)


@pytest.mark.parametrize(("field", "value"), cases(0))
def test_legal_values_are_taken(field, value):
    extra = {"max_tokens": None} if field == "min_tokens" else {"best_of": 128} if field == "n" else {}
    params = SamplingParams(**{field: value, **extra})
    assert dataclasses.replace(params) == params  # the normal form is itself legal


@pytest.mark.parametrize(("field", "value"), cases(1))
def test_illegal_values_are_refused_by_name(field, value):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert isinstance(caught.value, ValueError) and caught.value.field == field
    assert message.startswith(field + "=") and "must be" in message
    assert len(message) < 1000, "an error does not echo its input at length"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"top_p": 1.5}, "top_p=1.5 is not allowed: it must be a number in (0, 1] (1 is off)"),
        ({"temperature": NAN}, "temperature=nan is not allowed: it must be a number in [0, 1e6] (0 is greedy)"),
        ({"logit_bias": {"5": 1, 6: 101}}, "=101 is not allowed: it must be a number in [-100, 100] for token 6"),
        ({"logit_bias": {5: 1, "5": 1}}, "given once for each token, and 5 occurs twice"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids=-1 is not allowed: it must be None or a list of token ids"),
        ({"json_schema": "{"}, "this is no JSON ("),
        ({"json_schema": DEEP}, "this one is nested too deeply"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens=5 is not allowed: it must be at most max_tokens=4"),
        ({"n": 3, "best_of": 2}, "best_of=2 is not allowed: it must be None or an integer from n=3 to 128"),
        ({"n": 3, "beam_width": 2}, "n=3 is not allowed: it must be at most beam_width=2"),
        ({"best_of": 4, "beam_width": 4}, "best_of=4 is not allowed: it must be None with beam_width"),
        ({"temperature": 0.7, "beam_width": 4}, "temperature=0.7 is not allowed: it must be 0 or 1 with beam_width"),
        ({"top_p": 0.9, "beam_width": 4}, "top_p=0.9 is not allowed: it must be 1 with beam_width: a beam search does"),
        ({"regex": "a", "json_schema": {}}, "json_schema={} is not allowed: it must be None when regex is given"),
        ({"grammar": "a", "choice": ["a"]}, "grammar='a' is not allowed: it must be None when choice is given"),
    ],
)
def test_an_error_shows_the_value_and_what_is_allowed(fields, message):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**fields)
    assert message in str(caught.value)


def test_normal_forms():
    params = SamplingParams(temperature=1, stop="END", stop_token_ids=[3], logit_bias={"5": 1, 6: 2}, choice=["a", "b"])
    assert type(params.temperature) is float
    assert params.stop == ("END",) and params.stop_token_ids == (3,) and params.choice == ("a", "b")
    assert params.logit_bias == {5: 1.0, 6: 2.0} and SamplingParams(stop=[]).stop == SamplingParams().stop == ()
    assert SamplingParams(json_schema='{"type": "null"}').json_schema == {"type": "null"}
    of_numpy = SamplingParams(n=numpy.int64(2), temperature=numpy.float32(0.5))
    assert type(of_numpy.n) is int and type(of_numpy.temperature) is float
    with pytest.raises(ParameterError, match="n="):
        SamplingParams(n=numpy.bool_(True))
    with pytest.raises(TypeError, match="tempreature"):
        SamplingParams(tempreature=1)


def test_later_edits_of_the_arguments_change_nothing():
    stop, bias, schema = ["a"], {1: 1.0}, {"properties": {}}
    params = SamplingParams(stop=stop, logit_bias=bias, json_schema=schema)
    stop.append("b"), bias.update({2: 1.0}), schema["properties"].update(x={})
    assert params.stop == ("a",) and params.logit_bias == {1: 1.0} and params.json_schema == {"properties": {}}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


# The rules are what is in the list

EVEN = Rule((), sampling.WEIGHTS, lambda weights, row, state: weights * (torch.arange(len(weights)) % 2 == 0))
LIFT = Rule(("stop",), sampling.LOGITS, lambda row, state: row[7:8].add_(1000.0))


@pytest.fixture(params=[EVEN, LIFT], ids=["of weights", "of logits"])
def made_up(request, monkeypatch) -> tuple[Rule, set[int]]:
    """A rule that is in the list for one test, and the tokens that it leaves of 40."""
    monkeypatch.setattr(sampling, "RULES", [*sampling.RULES, request.param])
    return request.param, set(range(0, 40, 2)) if request.param is EVEN else {7}


@BACKENDS
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.9, "temperature": 2}, {"repetition_penalty": 1.2}])
def test_a_rule_in_the_list_is_in_force_wherever_tokens_are_drawn(made_up, backend, fields, monkeypatch):
    rule, allowed = made_up
    if rule.changes == sampling.WEIGHTS:  # which is another one than the kernel knows
        monkeypatch.setattr(sampling.kernels_native, "draw", lambda *_: pytest.fail("the native draw ignores the rule"))
    row, q = normal(1, 40), torch.full((40,), 1 / 40, dtype=torch.float64)
    for seed in range(30):
        one = state([1], [2], seed=seed, stop="x", **fields)
        assert set(probabilities(row[0], one).nonzero().flatten().tolist()) <= allowed
        assert sample(row, [one])[0].token in allowed
        draft = dict(guess_probs=[q], num_guessed=1, seq=SimpleNamespace(num_draft=1))
        answer = SimpleNamespace(sampler=one, request=SimpleNamespace(params=one.params), **draft)
        assert verdict(answer, row[0], sampling.draw(q, one.uniform(3)), None).token in allowed


def test_a_rule_of_logits_is_in_force_for_greedy_rows_and_beside_others(made_up):
    rule, allowed = made_up
    rows = normal(3, 40)
    got = tokens(sample(rows, [state(temperature=0, stop="x"), state(temperature=0), state(temperature=0, top_k=3)]))
    assert got[1:] == rows[1:].argmax(-1).tolist(), "which it is not active for"
    assert got[0] == (rows[0].argmax() if rule is EVEN else 7)


def test_a_rule_is_active_where_one_of_its_fields_is_not_at_its_default():
    def active(**fields):
        rules = state(**fields).params.active
        return [sampling.RULES.index(rule) for rule in (*rules[sampling.LOGITS], *rules[sampling.WEIGHTS])]

    assert active() == active(logprobs=3, stop=["x"], n=2, top_k=0) == []
    assert active(logit_bias={1: 2}, min_tokens=1, min_p=0.1, top_k=5, top_p=0.9, typical_p=0.9) == [0, 2, 3, 4, 5, 6]
    assert active(presence_penalty=1) == active(frequency_penalty=1) == active(repetition_penalty=2) == [1]
    assert SamplingParams(top_p=0.9, min_p=0.1, top_k=5).drawn_natively
    assert not SamplingParams(typical_p=0.9).drawn_natively


# Filters and draws


def sorted_reference(row: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The filters by their definitions, over a full sort: whole numbers [V] in float64, 0 = dropped."""
    order = row.sort(descending=True, stable=True).indices
    if params.greedy:
        return (torch.arange(len(row)) == order[0]).double()
    weights = (((row - row.max()) / params.temperature).exp() * sampling.FULL_WEIGHT).round().double()
    order = order[weights[order] >= params.min_p * sampling.FULL_WEIGHT]
    order = order[: params.top_k] if params.top_k > 0 else order
    reach = weights[order].cumsum(0)
    order = order[: int((reach < params.top_p * reach[-1]).sum()) + 1]
    return torch.zeros(len(row), dtype=torch.float64).index_copy_(0, order, weights[order])


GREEDY_TOO = {"temperature": st.sampled_from([0, 1e-6, 1e6]) | FILTERS["temperature"]}
# Coarse values give ties everywhere; the fine ones give none; -inf is what masks leave.
LOGIT_LISTS = st.lists(
    st.one_of(st.integers(-3, 3).map(float), st.floats(-30, 30, width=32), st.sampled_from([-INF, 3e38, -3e38])),
    min_size=1,
    max_size=60,
).filter(lambda values: max(values) > -INF)


@given(LOGIT_LISTS, st.fixed_dictionaries({}, optional=FILTERS | GREEDY_TOO), st.integers(0, 2**40))
def test_filters_and_draws_equal_a_full_sort_exactly(values, fields, seed):
    row, one = torch.tensor(values), state(seed=seed, **fields)
    weights = sorted_reference(row, one.params)
    assert torch.equal(probabilities(row, one), weights / weights.sum())
    rest, expected = one.uniform() * int(weights.sum()), 0
    while (rest := rest - int(weights[expected])) >= 0:
        expected += 1
    assert tokens(sample(row[None], [one])) == [expected]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_real_vocabulary_equals_a_full_sort_exactly(shape):
    row = SHAPES[shape]()
    for fields in FILTERS_AT_SIZE:
        weights = sorted_reference(row, SamplingParams(**fields))
        assert torch.equal(probabilities(row, state(**fields)), weights / weights.sum()), fields


@pytest.mark.parametrize("kept", [1, 40, 511, 512, 513, 4096, 4097, 40_000])
def test_a_nucleus_that_ends_exactly_on_a_border_takes_no_token_more(kept):
    row = SHAPES["flat"]()
    weights = sorted_reference(row, SamplingParams()).sort(descending=True).values
    fields = {"top_p": float(weights[:kept].sum() / weights.sum())}
    expected = sorted_reference(row, SamplingParams(**fields)) > 0
    assert torch.equal(probabilities(row, state(**fields)) > 0, expected)


@given(LOGIT_LISTS, st.floats(0.01, 0.999), st.sampled_from([{}, {"top_k": 5}, {"temperature": 2.0, "min_p": 0.01}]))
def test_typical_p_equals_a_plain_reference(values, share, fields):
    """Meister et al.: of the tokens sorted by | -log p - H |, the shortest run that holds the share."""
    row = torch.tensor(values)
    p = probabilities(row, state(**fields)).numpy()
    surprise = -numpy.log(p, where=p > 0, out=numpy.full(len(p), -INF))
    distance = numpy.abs(surprise - numpy.sum(p[p > 0] * surprise[p > 0]))
    got = probabilities(row, state(typical_p=share, **fields)).numpy()
    kept, dropped = got > 0, (got == 0) & (p > 0)
    assert kept.any() and not (kept & (p == 0)).any()
    numpy.testing.assert_allclose(got, numpy.where(kept, p, 0) / p[kept].sum(), rtol=1e-12)
    assert p[kept].sum() >= share - 1e-9, "the mass is reached"
    last = distance[kept].max()
    assert not dropped.any() or distance[dropped].min() >= last - 1e-9, "the nearest are kept"
    assert p[kept].sum() - p[kept & (distance >= last - 1e-9)].max() < share + 1e-9, "and no token more"


def test_draw_never_lands_on_nothing():
    """A u on a border belongs to the right, and the last one still hits the last token that has weight."""
    assert sampling.draw(torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]), 0.0) == 1
    assert sampling.draw(torch.tensor([0.0, 1.0, 0.0, 1.0, 0.0]), 0.5) == 3
    for seed in range(50):
        weights = torch.cat([normal(1, 30, seed)[0].abs(), torch.zeros(3)])
        assert sampling.draw(weights, 1 - 2.0**-53) == 29


def chi_square_bound(freedom: int, z: float = 3.7) -> float:
    """Wilson and Hilferty's approximation of the quantile at z standard deviations (1 in 10,000)."""
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


DRAWN = [{}, {"temperature": 0.6}, {"temperature": 2.0, "top_k": 5}, {"top_p": 0.8}, {"min_p": 0.15}]
DRAWN += [{"typical_p": 0.6}, {"typical_p": 0.4, "temperature": 0.7, "top_k": 8}]
DRAWN += [{"temperature": 1.3, "min_p": 0.02, "top_k": 7, "top_p": 0.93, "repetition_penalty": 1.4}]


@pytest.mark.parametrize("fields", DRAWN)
def test_draws_follow_the_distribution(fields):
    """Chi-square over a vocabulary of 9, along one request."""
    row, draws = torch.tensor([2.0, 0.5, 1.0, -1.0, 0.0, 1.5, -3.0, 0.7, 1.0]), 1200
    seen = state([0, 1], [1, 3, 3], **fields)
    exact, processed = probabilities(row, seen), constrained(row, seen)[None]
    # Penalties are applied once, so that each draw starts from the same row.
    plain = {name: value for name, value in fields.items() if "penalty" not in name}
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
    def uniform(seed, index, position, stream):
        one = state(seed=seed, index=index)
        one.n_output = position
        return one.uniform(stream)

    numbers = [uniform(*(x + i * (j == axis) for j, x in enumerate([123, 0, 5, 0]))) for i in range(4000)]
    assert all(0 <= u < 1 for u in numbers)
    counts = Counter(int(u * 20) for u in numbers)
    assert sum((counts[b] - 200) ** 2 / 200 for b in range(20)) < chi_square_bound(19)
    serial = sum((a - 0.5) * (b - 0.5) for a, b in itertools.pairwise(numbers)) / len(numbers) * 12
    assert abs(serial) < 4 / math.sqrt(len(numbers))
    seeds = [0, -1, -(2**63), 2**63 - 1, 2**64 - 1]  # -1 and 2**64 - 1 are the same 64 bits
    assert len({uniform(seed, 0, 0, 0) for seed in seeds}) == len(seeds) - 1


# Rows in company

COMPANY = [  # what may stand in one batch: every kind of row
    {"temperature": 0},
    {"temperature": 0, "logprobs": 3},
    {"temperature": 0, "repetition_penalty": 1.5},
    {},
    {"temperature": 0.7, "top_k": 20, "logprobs": 0},
    {"top_p": 0.9, "frequency_penalty": 1.0},
    {"min_p": 0.1, "logit_bias": {"5": 3, "7": -100}},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.8, "min_tokens": 9, "best_of": 2},
    {"typical_p": 0.7},
]


def company(vocab: int, broken: bool = False) -> tuple[torch.Tensor, list[SamplerState], list]:
    rows = normal(len(COMPANY), vocab, seed=3)
    if broken:
        rows[3, 11] = math.nan
    states = [state([1, 2, 3], [3, 4, i], seed=i, eos=[2], **fields) for i, fields in enumerate(COMPANY)]
    masks = [None if i % 3 else torch.arange(vocab - 5) % 2 == 0 for i in range(len(COMPANY))]
    return rows, states, masks


@BACKENDS
@given(st.lists(st.integers(0, len(COMPANY) - 1), min_size=1, max_size=12), st.sampled_from([320, 331]), st.booleans())
def test_a_row_is_bit_identical_in_any_batch(backend, members, vocab, broken):
    rows, states, masks = company(vocab, broken)
    alone = [repr(sample(rows[i : i + 1], [states[i]], [masks[i]])[0]) for i in members]
    chosen = [states[i] for i in members], [masks[i] for i in members]
    strided = rows[members].t().contiguous().t()  # the same values, other strides
    before = repr(rows.tolist())
    for batch in (sample(rows[members], *chosen), sample(rows, *chosen, members), sample(strided, *chosen)):
        assert list(map(repr, batch)) == alone
    assert repr(rows.tolist()) == before, "the rows of others, and those drawn from, stay as they are"


@BACKENDS
def test_a_row_is_bit_identical_in_any_batch_at_full_size(backend):
    rows, states, masks = company(49_152)
    alone = [sample(rows[i : i + 1], [states[i]], [masks[i]])[0] for i in range(len(rows))]
    for order in (list(range(9)), [5, 3, 8], [7, 6, 5, 4, 3, 2, 1, 0]):
        assert sample(rows[order], [states[i] for i in order], [masks[i] for i in order]) == [alone[i] for i in order]


@pytest.mark.parametrize("vocab", [1, 2, 7, 255, 256, 257, 320, 1000, 49_152, 50_257])
def test_argmax_is_torchs_and_takes_the_lowest_id(vocab):
    rows = normal(5, vocab).round()  # rounding makes ties
    rows[4] = -1.0
    rows[3, vocab // 2] = float("nan")
    best, ids = sampling.argmax(rows, range(5))
    assert ids[:3] == rows[:3].argmax(-1).tolist() and best[:3] == rows[:3].amax(-1).tolist()
    assert ids[4] == 0 and best[4] == -1.0 and math.isnan(best[3])
    some = [4, 0, 0, 2]
    assert sampling.argmax(rows, some) == ([best[r] for r in some], [ids[r] for r in some])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_other_dtypes_and_the_callers_tensor_stay_as_they_are(dtype):
    rows = normal(2, 40).to(dtype)
    before = rows.clone()
    states = [state(temperature=0, logit_bias={3: 50}), state(repetition_penalty=2, prompt=[1])]
    assert sample(rows, states) == sample(rows.float(), states)
    probabilities(rows[0], states[0])
    assert torch.equal(rows, before) and rows.dtype == dtype


EXTREMES = [{"temperature": 1e6}, {"temperature": 1e-5}, {"repetition_penalty": 1e-4}, {"repetition_penalty": 1e4}]
EXTREMES += [{"top_p": 1e-300}, {"typical_p": 1e-300}, {"typical_p": 0.999999}, {"top_k": 10**400}]


@pytest.mark.parametrize("fields", EXTREMES)
@BACKENDS
def test_extremes_neither_overflow_nor_lose_every_token(fields, backend):
    rows = torch.tensor([[3e38, -3e38, 0.0, -INF], [1e-38, -1e-38, 0.0, -INF], [-3e38, -3e38, -INF, -INF]])
    one = state([0, 1], [1, 2, 3], seed=5, **fields)
    for row in rows:
        p = probabilities(row, one)
        assert torch.isfinite(p).all() and float(p.sum()) == pytest.approx(1) and p[3] == 0
    assert all(isinstance(result, Sampled) for result in sample(rows, [one] * 3))


# Greedy, seeds, broken rows


def test_answers_of_one_seed_differ_and_reproduce():
    row = normal(1, 300, spread=1.0)

    def run(seed, index):
        walker = SamplerState(SamplingParams(n=3, seed=seed), [1, 2], index, seed=99)
        for _ in range(12):
            (token,) = tokens(sample(row, [walker]))
            walker.commit(token)
            yield token

    answers = {(seed, index): tuple(run(seed, index)) for seed in (0, 1, 99) for index in range(3)}
    assert answers == {(seed, index): tuple(run(seed, index)) for seed, index in answers}
    assert len(set(answers.values())) == 9, "seed 0 is a seed"
    assert tuple(run(None, 2)) == answers[99, 2], "the engine's seed stands in"
    unseeded = [SamplerState(SamplingParams(), []) for _ in range(8)]
    assert len(set(tokens(sample(torch.zeros(8, 10_000), unseeded)))) > 1


def test_a_fork_takes_its_own_index_and_goes_on_from_the_same_place():
    row, trunk = normal(1, 300, spread=1.0), state([1], [2, 3], seed=5)
    assert tokens(sample(row, [trunk.fork(4)])) == tokens(sample(row, [state([1], [2, 3], seed=5, index=4)]))
    assert sample(row, [trunk.fork(0)]) == sample(row, [trunk]), "a guess ahead shares the random stream"
    assert len({sample(row, [trunk.fork(index)])[0].token for index in range(20)}) > 10


@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"temperature": 0, "logit_bias": {0: 5}}, {"logprobs": 2}])
@pytest.mark.parametrize("poison", [math.nan, INF, -INF])
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
def test_a_row_that_is_not_finite_is_an_error_and_its_neighbours_go_on(poison, fields, masked):
    rows = normal(3, 512)
    rows[1, :] = poison if poison == -INF else rows[1]
    rows[1, 300] = poison
    states = [state([1], [2], seed=i, **fields) for i in range(3)]
    masks = [torch.arange(512) < 100 if masked else None] * 3  # the mask would hide the bad entry
    got = sample(rows, states, masks)
    assert isinstance(got[1], ValueError) and "bfloat16 or float32" in str(got[1])
    assert [got[0], got[2]] == sample(normal(3, 512)[[0, 2]], [states[0], states[2]], masks[:2])
    assert isinstance(sampling.prompt_logprobs(rows, [0, 0, 0], 1)[1], ValueError)
    with pytest.raises(ValueError, match="logits hold"):
        probabilities(rows[1], states[1], masks[1])


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


def test_logprobs_cost_nothing_unless_they_are_needed():
    row = normal(1, 50)
    plain, ranked, empty = (sample(row, [state(**fields)])[0] for fields in ({}, {"best_of": 2}, {"logprobs": 0}))
    assert plain == Sampled(plain.token) and ranked.logprob is not None and ranked.top is None and empty.top == []


@given(st.lists(st.integers(1, 9), min_size=1, max_size=10))
def test_prompt_logprobs_do_not_depend_on_chunks(chunks):
    n = sum(chunks)
    logits, targets = normal(n, 131), [(7 * i) % 131 for i in range(n)]
    whole, pieces, start = sampling.prompt_logprobs(logits, targets, 3), [], 0
    for size in chunks:
        pieces += sampling.prompt_logprobs(logits[start : start + size], targets[start : start + size], 3)
        start += size
    assert pieces == whole
    exact = torch.log_softmax(logits.double(), -1)[range(n), targets]
    assert [scored.logprob for scored in whole] == pytest.approx(exact.tolist(), abs=1e-5)
    assert tokens(whole) == targets
    scored = sampling.prompt_logprobs(torch.tensor([[0.0, -INF, 0.0]]), [1], 2)[0]
    assert scored.logprob == -INF and scored.rank == 3 and [i for i, _ in scored.top] == [0, 2]


@pytest.mark.parametrize("fields", [{}, {"top_k": 40}, {"top_p": 0.9}, {"typical_p": 0.9}, {"logprobs": 20}])
def test_no_filter_sorts_the_vocabulary_of_a_row_like_a_models(fields, monkeypatch):
    sorted_sizes, plain = [0], torch.Tensor.sort

    def counting(self, *args, **kwargs):
        sorted_sizes.append(len(self))
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(kernels, "backend", lambda: "reference")
    monkeypatch.setattr(torch.Tensor, "sort", counting)
    rows = -3 * torch.arange(1.0, 49_153).log().repeat(4, 1)  # token of rank r has a share of r**-3
    sample(rows, [state(seed=seed, **fields) for seed in range(4)])
    assert max(sorted_sizes) < 1000


# Penalties and bans


def test_bias_comes_before_penalties_and_nothing_lifts_a_ban():
    row = torch.ones(4)
    biased = state([0], logit_bias={0: 3, 1: 3}, repetition_penalty=2)
    assert constrained(row, biased).tolist() == [2.0, 4.0, 1.0, 1.0]
    banned = state([1], [1], logit_bias={1: 100, 2: 100}, min_tokens=2, stop_token_ids=[2], presence_penalty=-2)
    assert constrained(row, banned, torch.tensor([True, False, True, True])).tolist() == [1.0, -INF, -INF, 1.0]


@given(
    st.lists(st.integers(0, 9), max_size=20),
    st.lists(st.one_of(st.integers(0, 9), st.integers(0, 90), st.just(-1)), max_size=120),
    st.sampled_from([1.0, 1.3]),
)
def test_counts_survive_any_commits_and_forks(prompt, script, repetition):
    """Script: commit a token, or (-1) go on with a fork. Penalised rows equal those of the definition."""
    row = normal(1, 91, seed=1)[0]
    fields = {"repetition_penalty": repetition, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    walked, output = state(prompt, **fields), []
    for step in script:
        if step >= 0:
            walked.commit(step)
            output.append(step)
        else:
            left, walked = walked, walked.fork(1)
            left.commit(50)  # whose tokens are its own
        expected = row.clone()
        for token in set(prompt) | set(output) if repetition != 1 else ():
            expected[token] = expected[token] * repetition if expected[token] < 0 else expected[token] / repetition
        for token, count in Counter(output).items():
            expected[token] -= 0.3 * count + 0.4
        torch.testing.assert_close(constrained(row, walked), expected, rtol=0, atol=1e-5)
    assert walked.n_output == len(output)


def test_min_tokens_bans_every_stop_id_until_then_and_every_eos_that_is_not_ignored():
    fields = {"temperature": 0, "logit_bias": {7: 100}, "min_tokens": 4}
    row = normal(1, 30)
    for ends in ({"eos": [5, 7, 9]}, {"ignore_eos": True, "stop_token_ids": [7]}):
        walker, out = state(**ends, **fields), []
        for _ in range(5):
            out += tokens(sample(row, [walker]))
            walker.commit(out[-1])
        assert 7 not in out[:4] and out[4] == 7
    assert tokens(sample(row, [state(eos=[5, 7, 9], ignore_eos=True, **fields)])) == [7]


def test_eos_wins_over_min_tokens_when_the_mask_leaves_nothing_else():
    row, complete = normal(1, 30), torch.zeros(30, dtype=torch.bool)
    complete[[3, 4]] = True
    for fields in ({"temperature": 0}, {}):
        assert tokens(sample(row, [state(eos=[3, 4], min_tokens=64, max_tokens=99, **fields)], [complete]))[0] in (3, 4)
    complete[20] = True  # now the text can go on, so it must
    assert tokens(sample(row, [state(eos=[3, 4], min_tokens=64, max_tokens=99)], [complete])) == [20]
    for end in ([], [5]):  # a stop token that is part of the text ends nothing: what is asked for cannot be
        (result,) = sample(row, [state(eos=end, stop_token_ids=[3, 4, 20], min_tokens=64, max_tokens=99)], [complete])
        assert isinstance(result, ValueError) and "forbid every token" in str(result)


@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"typical_p": 0.9}, {"top_p": 0.9, "logit_bias": {2: 100}}])
def test_a_mask_is_never_overstepped_and_ids_beyond_it_are_forbidden(fields):
    rows = normal(1, 64)
    rows[0, 60] = 50.0  # a padded id
    mask = torch.zeros(60, dtype=torch.bool)
    mask[[1, 17, 33]] = True
    assert {sample(rows, [state(seed=seed, **fields)], [mask])[0].token for seed in range(50)} <= {1, 17, 33}


def test_a_row_with_nothing_allowed_fails_alone():
    rows = normal(3, 8)
    got = sample(rows, [state(temperature=0)] * 3, [None, torch.zeros(8, dtype=torch.bool), None])
    assert isinstance(got[1], ValueError) and "forbid every token" in str(got[1])
    assert tokens([got[0], got[2]]) == [int(rows[0].argmax()), int(rows[2].argmax())]


def test_padded_ids_can_be_pushed_and_an_eos_id_beyond_the_vocabulary_harms_nothing():
    assert sample(normal(1, 64), [state(logit_bias={"63": 100}, logprobs=1)])[0].token == 63
    row = normal(1, 30)
    assert tokens(sample(row, [state(eos=[2, 30, 10**9], temperature=0, min_tokens=2)])) == [int(row.argmax())]
