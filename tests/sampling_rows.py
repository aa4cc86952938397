"""Rows of logits and sampler states for the tests of sampling."""

import torch

from sampling import SamplerState, SamplingParams


def state(prompt=(), output=(), *, choice=0, seed=0, eos=(), **fields) -> SamplerState:
    made = SamplerState(SamplingParams(**fields), prompt, choice=choice, seed=seed, eos_token_ids=eos)
    for token in output:
        made.commit(token)
    return made


def normal(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def tokens(results: list) -> list[int]:
    return [result.token for result in results]
