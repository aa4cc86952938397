"""From logits to a token: what a request may ask for, and how its next token is drawn.

Requests of one step have their own temperatures, filters, penalties and seeds, and each must get exactly the token it
would have got alone. So every row walks the same line of rules (`RULES`) on its own:

    raw logits [V] -> mask, logit_bias, penalties, min_tokens -> temperature -> min_p, top_k, top_p, typical_p
        |             `--------------- LOGITS --------------'                   `--------- WEIGHTS ----------'
        `-> log_softmax, untouched: what `logprobs` reports             one uniform sample u: the token <-'

    weights  |     5     | 2 |1|        8        |       laid end to end, 16 in all
    token          0       1  2         3                u = 0.46 -> 0.46 * 16 = 7.36 -> token 2

Sources: Holtzman et al. 2020 (top_p); Meister et al. 2023 (typical_p); Nguyen et al. 2024 (min_p); Keskar et al. 2019
(repetition penalty); Salmon et al. 2011 (random numbers from counters). Left out: eta and mirostat; a fused draw on the
GPU, which draws row by row.
"""

import copy
import hashlib
import math
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

import kernels
from formats.fields import ParameterError, integer, normal_form, option, real
from native import cpu as kernels_native

# Weight of the likeliest token. Weights are whole numbers, which float64 adds exactly up to 2**53, that is 2**34 times
# 2**19 tokens: no order of addition moves a border. Less than half a weight, 3e-11 of the likeliest, is never drawn.
FULL_WEIGHT = 2.0**34
GREEDY_BELOW = 1e-5  # a temperature below this is 0, as in vLLM
INF = math.inf
LOGITS, WEIGHTS = "logits", "weights"  # what a rule changes
STRUCTURES = ("regex", "json_schema", "choice", "grammar")


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for, checked and normalised at construction; ParameterError (a ValueError) names the field.

    A field's metadata, for command lines and servers: "help", and "kind": real, integer, switch (True or False), text,
    strings (one or a list), choice (a list of strings), ids (a list of integers), bias (a dict of numbers) or schema.
    """

    n: int = integer(1, 1, 128, "answers to the prompt")
    best_of: int | None = integer(None, 1, 128, "draw so many, return the n likeliest")
    beam_width: int | None = integer(None, 1, 64, "beams of a search without drawing")
    temperature: float = real(1.0, "[0, 1e6]", "0 is greedy", "divides the logits: above 1 is more random")
    top_p: float = real(1.0, "(0, 1]", "1 is off", "keep the fewest likeliest tokens that hold this probability")
    top_k: int = integer(0, -1, INF, "keep so many of the likeliest tokens, 0 or -1 is off")
    min_p: float = real(0.0, "[0, 1]", "0 is off", "keep tokens this likely, as a share of the likeliest")
    typical_p: float = real(1.0, "(0, 1]", "1 is off", "keep the fewest typical tokens that hold this probability")
    max_tokens: int | None = integer(16, 0, INF, "end after so many tokens, 0 only scores the prompt", none=True)
    min_tokens: int = integer(0, 0, INF, "ban EOS and stop ids until so many tokens are out")
    stop: str | Sequence[str] | None = option(None, "strings", "texts that end the answer")
    stop_token_ids: Sequence[int] | None = option(None, "ids", "tokens that end the answer")
    ignore_eos: bool = option(False, "switch", "EOS is a token like any other")
    include_stop_str_in_output: bool = option(False, "switch", "show the stop string, too")
    seed: int | None = integer(None, -(2**63), 2**63 - 1, "repeats what is drawn")
    logprobs: int | None = integer(None, 0, 20, "score tokens, and so many best ones")
    prompt_logprobs: int | None = integer(None, 0, 20, "the same for the prompt")
    presence_penalty: float = real(0.0, "[-2, 2]", "0 is off", "lowers the logit of tokens that are in the output")
    frequency_penalty: float = real(0.0, "[-2, 2]", "0 is off", "the same, as often as they occur")
    repetition_penalty: float = real(1.0, "[1e-4, 1e4]", "1 is off", "weakens tokens of the prompt and the output")
    logit_bias: Mapping[int | str, float] | None = option(None, "bias", "added to the logits of tokens")
    regex: str | None = option(None, "text", "the output matches this regular expression")
    json_schema: dict | str | None = option(None, "schema", "the output is JSON that satisfies it")
    choice: Sequence[str] | None = option(None, "choice", "the output is one of these texts")
    grammar: str | None = option(None, "text", "the output satisfies this Lark or GBNF grammar")

    def __post_init__(self) -> None:
        for f in fields(self):
            object.__setattr__(self, f.name, normal_form(f.name, getattr(self, f.name), **f.metadata["rule"]))
        for name, allowed in self._conflicts():
            raise ParameterError(name, getattr(self, name), allowed)

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        """Fields that are legal alone but not side by side, and what they must be."""
        shapes = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(shapes) > 1:
            yield shapes[1], f"None when {shapes[0]} is given: an output has one shape"
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            yield "min_tokens", f"at most max_tokens={self.max_tokens}"
        if self.best_of is not None and self.best_of < self.n:
            yield "best_of", f"None or an integer from n={self.n} to 128"
        if self.beam_width is not None:
            if self.n > self.beam_width:
                yield "n", f"at most beam_width={self.beam_width}"
            off = {
                name: (getattr(NEUTRAL, name),) for rule in RULES if rule.changes == WEIGHTS for name in rule.options
            }
            off |= {"top_k": (0, -1), "best_of": (None,), "temperature": (0, 1)}
            for name, values in off.items():
                if getattr(self, name) not in values:
                    allowed = " or ".join(str(value).removesuffix(".0") for value in values)
                    yield name, f"{allowed} with beam_width: a beam search does not draw"

    @cached_property
    def greedy(self) -> bool:
        """The likeliest token, lowest id on ties, whatever the other filters say."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1 or self.min_p == 1

    @cached_property
    def structured(self) -> bool:
        return any(getattr(self, name) is not None for name in STRUCTURES)

    @cached_property
    def scored(self) -> bool:
        """Whether the log-probability of each token is needed, to report it or to choose among best_of."""
        return self.logprobs is not None or self.best_of is not None

    @cached_property
    def active(self) -> dict[str, list["Rule"]]:
        """The rules in force, by what they change."""
        active: dict[str, list[Rule]] = {LOGITS: [], WEIGHTS: []}
        for rule in RULES:
            if not rule.options or any(getattr(self, name) != getattr(NEUTRAL, name) for name in rule.options):
                active[rule.changes].append(rule)
        return active

    @cached_property
    def drawn_natively(self) -> bool:
        """Whether native/sampling.h knows every filter in force."""
        return all(rule.native for rule in self.active[WEIGHTS])


class SamplerState:
    """What sampling remembers of one answer: its random stream, and how often which token stands in its output."""

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int], index=0, seed=None, eos_token_ids=()):
        """`seed` stands in when params.seed is None; without either, one is drawn. Answers of a request share it."""
        self.params, self.index, self.n_output = params, index, 0
        seed = seed if params.seed is None else params.seed
        self.seed = secrets.randbits(63) if seed is None else seed
        self.end_ids = [] if params.ignore_eos else list(eos_token_ids)  # EOS that is ignored ends nothing
        # Only the repetition penalty looks at the prompt; without it the prompt is not even read.
        self.counts = dict.fromkeys(prompt_ids if params.repetition_penalty != 1 else (), 0)

    def uniform(self, stream: int = 0) -> float:
        """A number in [0, 1), 53 bits of it: a hash of (seed, answer, position, stream), so nothing is ever rewound.
        Stream 0 draws the next token; speculation's guesses and verdicts, independent of it, take other ones."""
        counter = struct.pack("<Qqqq", self.seed % 2**64, self.index, self.n_output, stream)
        return (int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "little") >> 11) * 2.0**-53

    def commit(self, token: int) -> None:
        """`token` has become part of the output."""
        self.n_output += 1
        self.counts[token] = self.counts.get(token, 0) + 1

    def fork(self, index: int) -> "SamplerState":
        """An independent copy: for another answer (its index), or to guess ahead in this one (the same index)."""
        twin = copy.copy(self)
        twin.index, twin.counts = index, self.counts.copy()
        return twin


class Rule(NamedTuple):
    """One rule of the line. Everything that must know the rules reads `RULES`; what is put into that list is in force.

    options   it is active for SamplingParams in which one of these is not at its default; () is always
    changes   LOGITS: apply(row [V], state) changes logits in place; -inf bans a token, and no rule may lift it
              WEIGHTS: apply(weights [V], row [V], state) -> weights with some of them zeroed, never all
    native    native/sampling.h knows it: a row whose filters all say so is drawn there, any other by torch
    """

    options: tuple[str, ...]
    changes: str
    apply: Callable
    native: bool = False


def add_bias(row: Tensor, state: SamplerState) -> None:
    ids, bias = (torch.tensor(list(x), device=row.device) for x in zip(*state.params.logit_bias.items(), strict=True))
    row.index_add_(0, ids, bias)


def penalise(row: Tensor, state: SamplerState) -> None:
    params, seen = state.params, state.counts
    if not seen:
        return
    ids = torch.from_numpy(numpy.fromiter(seen, numpy.int64, len(seen))).to(row.device)  # [seen]
    counts = torch.from_numpy(numpy.fromiter(seen.values(), numpy.float32, len(seen))).to(row.device)  # [seen]
    before = row[ids]
    # A penalty must make a token less likely: dividing would raise a negative logit.
    logits = torch.where(before < 0, before * params.repetition_penalty, before / params.repetition_penalty)
    logits = logits - (params.frequency_penalty * counts + params.presence_penalty * (counts > 0))
    most = torch.finfo(row.dtype).max  # an extreme penalty saturates: it neither overflows nor forbids
    row[ids] = torch.where(before == -INF, before, logits.clamp_(-most, most))


def ban_stops(row: Tensor, state: SamplerState) -> None:
    if state.n_output < state.params.min_tokens:
        ends = [i for i in state.end_ids if i < len(row)]  # a tokenizer's EOS may lie beyond the model's vocabulary
        before = row[ends]
        row[[*ends, *state.params.stop_token_ids]] = -INF
        if row.amax() == -INF:  # a complete structured output must end, min_tokens or not
            row[ends] = before


def keep_min_p(weights: Tensor, row: Tensor, state: SamplerState) -> Tensor:
    return torch.where(weights >= state.params.min_p * FULL_WEIGHT, weights, 0)


def keep_top_k(weights: Tensor, row: Tensor, state: SamplerState) -> Tensor:
    if not 0 < state.params.top_k < len(row):
        return weights
    ids = best_ids(row, state.params.top_k)
    return torch.zeros_like(weights).index_copy_(0, ids, weights[ids])


def keep_top_p(weights: Tensor, row: Tensor, state: SamplerState) -> Tensor:
    return shortest_run(weights, row, state.params.top_p)


def keep_typical(weights: Tensor, row: Tensor, state: SamplerState) -> Tensor:
    """Keeps the tokens whose surprise -log p is nearest to its mean, the entropy."""
    p = weights.double() / weights.sum(dtype=torch.float64)
    distance = (p.log() + torch.special.entr(p).sum()).abs().float()  # [V], inf for what other filters dropped
    return shortest_run(weights, -distance, state.params.typical_p)


RULES = [
    Rule(("logit_bias",), LOGITS, add_bias),
    Rule(("repetition_penalty", "frequency_penalty", "presence_penalty"), LOGITS, penalise),
    Rule(("min_tokens",), LOGITS, ban_stops),
    Rule(("min_p",), WEIGHTS, keep_min_p, native=True),
    Rule(("top_k",), WEIGHTS, keep_top_k, native=True),
    Rule(("top_p",), WEIGHTS, keep_top_p, native=True),
    Rule(("typical_p",), WEIGHTS, keep_typical),
]
NEUTRAL = SamplingParams()


def shortest_run(weights: Tensor, rank: Tensor, share: float) -> Tensor:
    """Weights [V] of the fewest tokens, in the order of rank [V], that hold `share` of the mass; 0 elsewhere."""
    goal = share * weights.sum(dtype=torch.float64)
    for k in (512, 4096, len(rank)):  # the first is nearly always enough, and far cheaper than sorting a vocabulary
        ids = best_ids(rank, k)
        reach = weights[ids].cumsum(0, dtype=torch.float64)
        if reach[-1] >= goal:
            break
    ids = ids[: int(torch.searchsorted(reach, goal)) + 1]
    return torch.zeros_like(weights).index_copy_(0, ids, weights[ids])


def best_ids(row: Tensor, k: int) -> Tensor:
    """Ids of the k largest of [V], largest first, ties by id: the first k of a full stable sort, without the sort."""
    if k >= len(row):
        return row.sort(descending=True, stable=True).indices
    ids = (row >= row.topk(max(k, 1)).values[-1]).nonzero().squeeze(1)  # with all that tie: topk takes any of them
    return ids[row[ids].sort(descending=True, stable=True).indices[:k]]


def constrain(row: Tensor, state: SamplerState, mask: Tensor | None) -> None:
    """The mask (bool, up to [V], True = allowed; ids past its end are forbidden) and the LOGITS rules on a row [V]."""
    if mask is not None:
        row[: len(mask)].masked_fill_(~mask.to(row.device), -INF)
        row[len(mask) :] = -INF  # padded ids the tokenizer does not have
    for rule in state.params.active[LOGITS]:
        rule.apply(row, state)


def weigh(row: Tensor, best: float, state: SamplerState) -> Tensor:
    """Integer weights [V], as float32, by which a row of constrained logits is drawn; its largest is `best`."""
    weights = (row - best).div_(state.params.temperature).exp_().mul_(FULL_WEIGHT).round_()
    for rule in state.params.active[WEIGHTS]:
        weights = rule.apply(weights, row, state)
    return weights


def draw(weights: Tensor, u: float) -> int:
    """Index i of [N] with probability weights[i] / sum, decided by u in [0, 1). Weights >= 0, not all 0."""
    reach = weights.cumsum(0, dtype=torch.float64)
    # u <= 1 - 2**-53, so the product stays below the sum even after rounding, and index N cannot come out.
    return int(torch.searchsorted(reach, u * reach[-1], right=True))


def probabilities(row: Tensor, state: SamplerState, mask: Tensor | None = None) -> Tensor:
    """The distribution, float64 [V], that `sample` draws from, of a row of raw logits. Raises what `sample` returns."""
    processed = row.to(torch.float32, copy=True)
    constrain(processed, state, mask)
    (best,), (token,) = argmax(processed[None], [0])
    if error := row_error(float(row.amax()), best):
        raise error
    if state.params.greedy:
        weights = torch.arange(len(row), device=row.device) == token
    else:
        weights = weigh(processed, best, state)
    return weights.double() / weights.sum(dtype=torch.float64)


def argmax(logits: Tensor, rows: Sequence[int]) -> tuple[list[float], list[int]]:
    """Largest value and its lowest id, of each of the rows of [R, V]; a row with a NaN has NaN."""
    if logits.device.type == "cpu":  # numpy's argmax is vectorised, and no row is copied
        ids = [int(logits.numpy()[row].argmax()) for row in rows]
    else:  # in two stages, so that all threads of a GPU work: the first best block, its first best token
        blocks = logits[rows].unflatten(1, (-1, math.gcd(logits.shape[1], 256)))  # [rows, vocab / block, block]
        block = blocks.amax(-1).argmax(-1, keepdim=True)  # [rows, 1]; amax and argmax carry NaN along
        inside = blocks.take_along_dim(block[..., None], 1).argmax(-1)  # [rows, 1]
        ids = (block * blocks.shape[2] + inside).flatten().tolist()
    return logits[rows, ids].tolist(), ids


def row_error(raw_best: float, best: float) -> ValueError | None:
    """What is wrong with a row, by its largest raw and its largest constrained logit; None if it can be drawn from."""
    if not math.isfinite(raw_best):
        what = {INF: "+inf", -INF: "-inf only"}.get(raw_best, "NaN")
        remedy = "a 16-bit dtype may have overflowed: load the model as bfloat16 or float32, and check its weights"
        return ValueError(f"the model's logits hold {what}; {remedy}")
    if not math.isfinite(best):
        return ValueError("the mask, logit_bias and the model's own -inf together forbid every token")
    return None


class Sampled(NamedTuple):
    """A token and, where asked for, its log-probability, rank (1 = best) and the best (id, log-probability) pairs."""

    token: int
    logprob: float | None = None
    rank: int | None = None
    top: list[tuple[int, float]] | None = None


def score(row: Tensor, token: int, k: int | None) -> Sampled:
    """log_softmax of one finite row of raw logits [V], read at `token` and, unless k is None, at the k best ids."""
    best = row.amax()
    log_sum = float(best) + math.log((row - best).exp_().sum(dtype=torch.float64))
    value = row[token]
    rank = 1 + int((row > value).sum()) + int((row[:token] == value).sum())
    top = None
    if k is not None:
        ids = best_ids(row, k)
        top = [(i, x - log_sum) for i, x in zip(ids.tolist(), row[ids].tolist(), strict=True)]
    return Sampled(token, float(value) - log_sum, rank, top)


def prompt_logprobs(logits: Tensor, targets: Sequence[int], k: int) -> list[Sampled | ValueError]:
    """How likely each of n known tokens was: row i of raw logits [n, V] predicted targets[i]; k best beside it.

    A row of NaN, +inf or only -inf has its ValueError. The first token of a prompt has no row.
    """
    raw = logits.float().contiguous()
    best = raw.amax(-1).tolist()  # carries NaN along
    return [row_error(b, b) or score(row, token, k) for b, row, token in zip(best, raw, targets, strict=True)]


def sample(logits: Tensor, states: Sequence[SamplerState], masks=None, rows=None) -> list[Sampled | ValueError]:
    """The next token of each state from its row of raw logits [R, V], or the ValueError of a row that gives none.
    masks: for each state what `constrain` takes; rows: which row is whose, each in turn if not given."""
    raw = logits.float().contiguous()
    masks = [None] * len(states) if masks is None else masks
    rows = range(len(raw)) if rows is None else rows
    plain, changed = {}, {}  # state: its row. What no rule changes is not copied, for a row is 200 kB
    for i, (row, state, mask) in enumerate(zip(rows, states, masks, strict=True)):
        (plain if mask is None and not state.params.active[LOGITS] else changed)[i] = row
    chosen, raw_best = choose(raw, plain, states), {}
    if changed:
        copies = raw[list(changed.values())]  # [changed, V]
        raw_best = dict(zip(changed, copies.amax(1).tolist(), strict=True))  # a mask may hide what is not finite
        for row, i in zip(copies, changed, strict=True):
            constrain(row, states[i], masks[i])
        chosen |= choose(copies, dict(zip(changed, range(len(changed)), strict=True)), states)
    results: list[Sampled | ValueError] = []
    for i, row in enumerate(rows):
        best, token = chosen[i]
        error, params = row_error(raw_best.get(i, best), best), states[i].params
        scored = params.scored and error is None
        results.append(score(raw[row], token, params.logprobs) if scored else error or Sampled(token))
    return results


def choose(table: Tensor, rows: dict[int, int], states: Sequence[SamplerState]) -> dict[int, tuple[float, int]]:
    """{i: (largest logit, next token)} of state i from row rows[i] of the table of constrained logits [R, V]. Each row
    is drawn on its own, so that no sum sees the batch: by the native kernel if it knows all its filters. The kernel's
    e^x has another last bit, so a u within a millionth of a border may give the token beside it."""
    chosen = dict(zip(rows, zip(*argmax(table, list(rows.values())), strict=True), strict=True))
    native = kernels.backend() == "native" and table.device.type == "cpu"
    drawings = {}  # i: what the kernel needs to know
    for i, (best, _) in chosen.items():
        state, p = states[i], states[i].params
        if p.greedy or not math.isfinite(best):
            continue
        if native and p.drawn_natively:
            top_k = min(p.top_k, table.shape[1])  # which may be a number that no float holds
            drawings[i] = (best, p.temperature, p.min_p, top_k, p.top_p, state.uniform())
        else:
            chosen[i] = best, draw(weigh(table[rows[i]], best, state), state.uniform())
    if drawings:
        drawn = kernels_native.draw(table, list(map(rows.get, drawings)), list(drawings.values()))
        for i, token in zip(drawings, drawn, strict=True):
            chosen[i] = chosen[i][0], token
    return chosen
