"""A step laid out for the model: tokens of many sequences as one flat run, with everything that says whose they are.

The problem. The scheduler thinks in sequences ("five tokens of A, one of B"), the model in rows of tensors.

The idea. Walk the sequences once and write down, for every token, what the model must know of it: its position, the
slot of the pool that will hold its key and value, and whether its logits are wanted. Pages become a table of integers:

    step       A: tokens 4..8, pages [7, 2]   B: token 9, pages [5, 1, 3]            block size 5
    tokens     [ a4 a5 a6 a7 a8 | b9 ]       positions [ 4 5 6 7 8 | 9 ]
    slots      [ 39 10 11 12 13 |  9 ]       page of the position * 5 + place in the page
    tables     [[7 2 0], [5 1 3]]            padded with block 0, which nobody owns

Source: vLLM (Kwon et al. 2023, section 4.3) for slots and block tables; Orca (Yu et al. 2022, section 4.2) for the flat
run. Left out: layouts kept from step to step; building one anew costs a few microseconds a sequence.
"""

from __future__ import annotations

import torch

from model import Batch
from sequence import Step


def build_batch(step: Step, rows: list[range], block_size: int, device: torch.device | str) -> Batch:
    """Lay the tokens of a step out as one flat run; `rows` are the positions of each entry whose logits are wanted."""
    tokens, positions, slots, starts, wanted = [], [], [], [0], []
    for (seq, n), positions_wanted in zip(step.entries, rows, strict=True):
        start, table = seq.num_computed, seq.block_table
        wanted += [starts[-1] + p - start for p in positions_wanted]
        tokens += seq.tokens[start : start + n]
        positions += range(start, start + n)
        slots += [table[p // block_size] * block_size + p % block_size for p in range(start, start + n)]
        starts.append(starts[-1] + n)
    sequences = [seq for seq, _ in step.entries]
    # At least two of each, with empty ones as padding: torch.compile takes a size of one for a constant.
    width = max(2, *(len(seq.block_table) for seq in sequences))
    padding = [[0] * width] * (2 - len(sequences))
    tables = [seq.block_table + [0] * (width - len(seq.block_table)) for seq in sequences] + padding
    lens = [seq.num_computed + n for seq, n in step.entries] + [0] * len(padding)

    def tensor(values, dtype=torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    rows_of = tensor([tokens, positions, slots]).unbind()
    return Batch(
        tokens=rows_of[0],
        positions=rows_of[1],
        slot_mapping=rows_of[2],
        block_tables=tensor(tables, torch.int32),
        query_start=tensor(starts + starts[-1:] * len(padding), torch.int32),
        context_lens=tensor(lens, torch.int32),
        logit_rows=tensor(wanted),
        one_each=len(wanted) == len(tokens) == len(sequences),
    )
