"""Rows of logits and sampler states for the tests of sampling."""

import torch

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


def shaped(shape: str, vocab: int = 49_152) -> torch.Tensor:
    """A row of logits [V] of a real vocabulary's size: "peaked", "flat", "all equal", "two levels", "bfloat16 ties"."""
    return {
        "peaked": lambda: normal(1, vocab, spread=4.0)[0],
        "flat": lambda: normal(1, vocab, spread=0.1)[0],
        "all equal": lambda: torch.full((vocab,), -7.25),
        "two levels": lambda: (torch.arange(vocab) % 3 == 1).float(),
        "bfloat16 ties": lambda: normal(1, vocab).bfloat16().float()[0],
    }[shape]()
