"""Draws by the C++ kernel against their definition in sampling.py, and what must hold bit for bit.

The two compute e^x with another last bit, so a u within a millionth of the border of two tokens may give either;
everywhere else they must agree.
"""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import SEEDS, drawn
from sampling_rows import FILTERS, FILTERS_AT_SIZE, SHAPES, normal, state

from native import cpu as kernels_native
from sampling import probabilities

pytestmark = pytest.mark.usefixtures("native")

NEAR = 1e-6
SAMPLES = torch.linspace(0, 1, 258, dtype=torch.float64)[1:-1].tolist()
VOCABS = st.sampled_from([1, 2, 7, 8, 15, 16, 17, 511, 512, 513, 1500])


def drawn_at(row: torch.Tensor, samples: list[float], temperature=1.0, top_p=1.0, top_k=0, min_p=0.0) -> list[int]:
    """The token of a row of logits [V] for each uniform sample, by the kernel."""
    drawing = (float(row.max()), temperature, min_p, top_k, top_p)
    return kernels_native.draw(row[None], [0] * len(samples), [(*drawing, u) for u in samples])


def check(row: torch.Tensor, **fields) -> None:
    """Every u gives the token that the reference says, or lies within NEAR of its border."""
    p = probabilities(row, state(**fields))
    reach = p.cumsum(0)
    for u, token in zip(SAMPLES, drawn_at(row, SAMPLES, **fields), strict=True):
        assert p[token] > 0 and reach[token] - p[token] - NEAR <= u <= reach[token] + NEAR, (u, token, fields)


@drawn
@given(VOCABS, SEEDS, st.sampled_from([0.0, 0.5, 3.0, 20.0]), st.fixed_dictionaries({}, optional=FILTERS))
def test_draws_equal_the_reference(vocab, seed, spread, fields):
    check(normal(1, vocab, seed, spread)[0], **fields)


@pytest.mark.parametrize("shape", SHAPES)
def test_draws_from_a_real_vocabulary_equal_the_reference(shape):
    for fields in [{}, *FILTERS_AT_SIZE]:
        check(SHAPES[shape](), **fields)


def test_extreme_logits_weigh_nothing_and_break_nothing():
    row = torch.tensor([-math.inf, 3e38, -3e38, 3e38, 1.0])
    assert set(drawn_at(row, SAMPLES)) == {1, 3}
    assert set(drawn_at(row, SAMPLES, temperature=1e-5)) == {1, 3}
    assert set(drawn_at(row, SAMPLES, top_k=2, top_p=0.4)) == {1}, "of equals the lower id"
    assert drawn_at(torch.zeros(4), [0.0, 0.25, 0.5, 0.75, 1 - 2**-53]) == [0, 1, 2, 3, 3]
    assert drawn_at(torch.zeros(4), [0.0, 0.5, 1 - 2**-53], top_k=2) == [0, 1, 1]


def test_blocks_are_passed_over_only_where_nothing_in_them_counts():
    assert drawn_at(torch.zeros(1536), [511 / 1536, 512 / 1536, 1024 / 1536]) == [511, 512, 1024]
    row = torch.full((1500,), -50.0)
    row[0], row[1], row[600] = 0.0, math.log(1.2 / 1024), math.log(1.4 / 1024)  # the last one alone in its block
    assert set(drawn_at(row, [0.0, 1 - 2**-53], top_k=2)) == {0, 600}


def test_a_wrong_draw_touches_no_memory_it_does_not_own():
    row = torch.zeros(2, 8)
    row[0, 1], row[1, 2] = 80.0, math.nan
    for best in (0.0, 200.0, -math.inf, math.nan):
        for filters in ((0, 1.0), (1, 1.0), (3, 0.5), (0, 0.5)):
            picked = kernels_native.draw(row, [0, 1], [(best, 1.0, 0.0, *filters, 0.99)] * 2)
            assert all(0 <= token < 8 for token in picked)
    for bad in (-1, 2):
        with pytest.raises(ValueError, match="row index"):
            kernels_native.draw(row, [0, bad], [(0.0, 1.0, 0.0, 0, 1.0, 0.5)] * 2)
