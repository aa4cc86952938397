"""Rows of logits and sampler states for the tests of sampling."""

import math

import torch
from hypothesis import strategies as st

from sampling import SamplerState, SamplingParams, constrain


def state(prompt=(), output=(), *, index=0, seed=0, eos=(), **fields) -> SamplerState:
    made = SamplerState(SamplingParams(**fields), prompt, index, seed, eos)
    for token in output:
        made.commit(token)
    return made


def normal(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def constrained(row: torch.Tensor, state: SamplerState, mask=None) -> torch.Tensor:
    """A copy of a row of logits [V] after the mask and the rules that change logits."""
    row = row.clone()
    constrain(row, state, mask)
    return row


def tokens(results: list) -> list[int]:
    return [result.token for result in results]


VOCAB = 49_152  # a real one's size
SHAPES = {  # rows of logits [VOCAB]
    "peaked": lambda: normal(1, VOCAB, spread=4.0)[0],
    "flat": lambda: normal(1, VOCAB, spread=0.1)[0],
    "all equal": lambda: torch.full((VOCAB,), -7.25),
    "two levels": lambda: (torch.arange(VOCAB) % 3 == 1).float(),
    "bfloat16 ties": lambda: normal(1, VOCAB).bfloat16().float()[0],
    "masked": lambda: normal(1, VOCAB, spread=4.0)[0].masked_fill(torch.arange(VOCAB) % 5 > 0, -math.inf),
}
FILTERS_AT_SIZE = [{"top_p": 0.9}, {"top_k": 40, "top_p": 0.5}, {"top_k": 3000}, {"min_p": 0.02, "top_p": 0.99}]
FILTERS = {
    "temperature": st.sampled_from([1e-5, 0.1, 0.7, 1.0, 2.0, 50.0]),
    "top_p": st.sampled_from([1e-300, 0.1, 0.25, 0.53, 0.75, 0.9, 0.999999, 1.0]),
    "top_k": st.sampled_from([-1, 0, 1, 2, 5, 50, 10**6]),
    "min_p": st.sampled_from([0.0, 1e-9, 0.05, 0.1, 0.51, 1.0]),
}
