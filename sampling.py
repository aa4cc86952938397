"""From logits to a token: what a request may ask for, and how its next token is drawn.

The problem. Thirty requests share one step, each with its own temperature, filters, penalties and seed. Each must get
exactly the token it would have got alone: in any batch, after a preemption, after a rolled back guess.

The idea. Every row walks the same line on its own, and nothing on the line remembers the batch:

    raw logits [V] --> logit_bias --> penalties -> bans (mask, min_tokens) -> temperature --> min_p --> top_k --> top_p
        |             `----------------- process_logits ----------------'     `------------ probabilities ------------'
        `--> log_softmax, untouched: what `logprobs` reports                                  one dart: the token <--'

Drawing is inverse-CDF: lay the kept tokens' weights end to end, throw one dart u in [0, 1), see on whom it lands.

    ticks    |     5     | 2 |1|        8        |       u = 0.46 -> 0.46 * 16 = 7.36 -> token 2
    token          0       1  2         3

Two things make that line exact. (1) A weight is a whole number of ticks, TICKS for the likeliest token: float64 sums of
whole numbers below 2**53 round nowhere, so no order of addition or path through the filters moves a border. (Price:
what is less than half a tick, 3e-11 of the likeliest, is never drawn.) (2) u is no generator's next output but a hash
of (seed, choice, position, stream): a generator that others also draw from, or that must be rewound, does not exist.

On a CPU the kernels draw (imported for that; sampling.h): the same line in few passes over a row. Their e^x has
another last bit, so a dart within a millionth of a border may land beside it; on one backend an answer stays the same.

Ranks are by logit, ties go to the lower id, everywhere: greedy, top_k=1 and min_p=1 give the same token. No filter
sorts the vocabulary: top_k selects, top_p sorts one bucket of it.

Sources: Holtzman et al. 2020, section 3.1 (top_p); Nguyen et al. 2024, section 3 (min_p); Keskar et al. 2019, section
4.1 (repetition penalty); the OpenAI API reference (presence, frequency, logit_bias); Salmon et al. 2011 (random numbers
from counters); filter order as in vLLM.

Left out: typical, eta, mirostat and no-repeat-ngram sampling; a fused sampler on the GPU (rows are drawn one by one).
"""

import copy
import hashlib
import json
import math
import numbers
import re
import reprlib
import secrets
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import NoneType
from typing import Any, NamedTuple

import torch

import kernels
from native import cpu as kernels_native

TICKS = 2.0**34  # of the likeliest token. 2**34 * 2**19 tokens = 2**53: sums are exact up to a vocabulary of 524,288
BUCKETS = (127 + 34 << 4) + 1  # of _nucleus: the upper 13 bits of the float32 TICKS, and 0
GREEDY_BELOW = 1e-5  # a temperature below this is 0, as in vLLM


class ParameterError(ValueError):
    """A field of SamplingParams holds what it must not; `field` names it."""

    def __init__(self, field: str, value: Any, allowed: str):
        self.field = field
        try:
            shown = reprlib.repr(value)  # bounded: an error must not echo a megabyte of bad input
        except ValueError:  # an integer of too many digits to print
            shown = f"<{type(value).__name__}>"
        super().__init__(f"{field}={shown} is not allowed: it must be {allowed}")


def option(default: Any, kind: str, check: Callable, allowed: str, meaning: str, none: Callable = NoneType) -> Any:
    """A field of SamplingParams. check(value) gives its normal form or raises; None, where allowed, becomes none()."""
    help_text = f"{meaning}; {allowed}"
    return field(default=default, metadata=dict(kind=kind, check=check, allowed=allowed, none=none, help=help_text))


def real(default: float, interval: str, note: str, meaning: str) -> Any:
    """A field that holds a number of an interval such as "(0, 1]"."""
    return option(default, "real", lambda v: _real(v, interval), f"a number in {interval} ({note})", meaning)


def integer(default: int | None, low: float, high: float, allowed: str, meaning: str) -> Any:
    """A field that holds an integer from low to high, or None if `allowed` begins with it."""
    return option(default, "integer", lambda v: _integer(v, low, high), allowed, meaning)


def _checked(name: str, value: Any, allowed: str, check: Callable) -> Any:
    try:
        return check(value)
    except ParameterError:
        raise
    except (ValueError, OverflowError):  # OverflowError: an integer beyond the range of floats
        raise ParameterError(name, value, allowed) from None


def _need(condition: Any) -> None:
    if not condition:
        raise ValueError


def _real(value: Any, interval: str) -> float:
    _need(isinstance(value, numbers.Real) and not isinstance(value, bool))
    number, (low, high) = float(value), map(float, interval[1:-1].split(","))
    _need(low <= number <= high and (interval[0] == "[" or number > low))  # NaN lies in no interval
    return number


def _integer(value: Any, low: float, high: float) -> int:
    _need(isinstance(value, numbers.Integral) and not isinstance(value, bool) and low <= value <= high)
    return int(value)


def _switch(value: Any) -> bool:
    _need(isinstance(value, bool))
    return value


def _text(value: Any) -> str:
    _need(isinstance(value, str) and value)
    return value


def _texts(value: Any) -> tuple[str, ...]:
    _need(isinstance(value, (list, tuple)))
    return tuple(map(_text, value))


def _choice(value: Any) -> tuple[str, ...]:
    _need(value)
    return _texts(value)


def _token_ids(value: Any) -> tuple[int, ...]:
    _need(isinstance(value, (list, tuple)))
    return tuple(_checked("stop_token_ids", token, IDS, lambda v: _integer(v, 0, math.inf)) for token in value)


def _bias(value: Any) -> dict[int, float]:
    """Token id -> bias. Keys as integers, or as strings of plain digits, for JSON has no other keys."""
    _need(isinstance(value, Mapping))
    bias: dict[int, float] = {}
    for key, number in value.items():
        token = int(key) if isinstance(key, str) and re.fullmatch(r"[0-9]{1,18}", key) else key
        token = _checked("logit_bias", token, BIAS, lambda v: _integer(v, 0, math.inf))
        if token in bias:
            raise ParameterError("logit_bias", value, f"given once for each token, and {token} occurs twice")
        allowed = f"a number in [-100, 100] for token {token}"
        bias[token] = _checked("logit_bias", number, allowed, lambda v: _real(v, "[-100, 100]"))
    return bias


def _schema(value: Any) -> dict:
    try:
        schema = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ParameterError("json_schema", value, f"{SCHEMA}; this is no JSON ({error})") from None
    _need(isinstance(schema, dict))
    try:
        return copy.deepcopy(schema)  # the caller may go on editing theirs
    except RecursionError:
        raise ParameterError("json_schema", value, f"{SCHEMA}; this one is nested too deeply") from None


IDS = "None or a list of token ids, each an integer >= 0"
BIAS = "None or a dict from token ids (integers >= 0) to numbers in [-100, 100]"
SCHEMA = "None, a JSON Schema as a dict, or the JSON text of one"
INF = math.inf


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for, checked and normalised at construction; ParameterError (a ValueError) names the field.

    A field's metadata says all that a command line or a server needs: "help" (text), and "kind": real, integer, switch
    (bool), text, strings (one or a list of them), choice (a list of strings), ids (a list of integers), bias (a dict
    from token ids to numbers), schema (a dict, or JSON text). None, where it is legal, is the same as leaving it out,
    except for max_tokens.
    """

    n: int = integer(1, 1, 128, "an integer from 1 to 128", "answers to the prompt")
    best_of: int | None = integer(
        None,
        1,
        128,
        "None or an integer from n to 128",
        "draw so many answers, keep the n of best mean log-probability",
    )
    beam_width: int | None = integer(None, 1, 64, "None or an integer from 1 to 64", "search beams instead of drawing")
    temperature: float = real(1.0, "[0, 1e6]", "0 is greedy", "divides the logits: below 1 sharper, above 1 flatter")
    top_p: float = real(1.0, "(0, 1]", "1 is off", "keep the fewest likeliest tokens that hold this probability")
    top_k: int = integer(0, -1, INF, "an integer >= 1, or 0 or -1 for off", "keep so many of the likeliest tokens")
    min_p: float = real(0.0, "[0, 1]", "0 is off", "keep tokens this likely, as a share of the likeliest one")
    max_tokens: int | None = integer(
        16, 0, INF, "None (up to the context) or an integer >= 0 (0 only scores the prompt)", "end after so many tokens"
    )
    min_tokens: int = integer(0, 0, INF, "an integer >= 0", "ban EOS and stop ids until so many tokens are out")
    stop: str | Sequence[str] | None = option(
        None, "strings", lambda v: (v,) if isinstance(v, str) and v else _texts(v),
        "None, a non-empty string or a list of non-empty strings", "texts that end the answer", tuple,
    )  # fmt: skip
    stop_token_ids: Sequence[int] | None = option(None, "ids", _token_ids, IDS, "tokens that end the answer", tuple)
    ignore_eos: bool = option(False, "switch", _switch, "True or False", "EOS is a token like any other")
    include_stop_str_in_output: bool = option(False, "switch", _switch, "True or False", "show the stop text as well")
    seed: int | None = integer(None, -(2**63), 2**63 - 1, "None or an integer of 64 bits", "repeats an answer")
    logprobs: int | None = integer(None, 0, 20, "None or an integer from 0 to 20", "log-probabilities of the k best")
    prompt_logprobs: int | None = integer(None, 0, 20, "None or an integer from 0 to 20", "the same for the prompt")
    presence_penalty: float = real(0.0, "[-2, 2]", "0 is off", "taken off the logit of a token in the output")
    frequency_penalty: float = real(0.0, "[-2, 2]", "0 is off", "the same for each time that it occurs")
    repetition_penalty: float = real(1.0, "[1e-4, 1e4]", "1 is off", "weakens the logit of each token seen so far")
    logit_bias: Mapping[int | str, float] | None = option(None, "bias", _bias, BIAS, "added to logits", dict)
    regex: str | None = option(None, "text", _text, "None or a non-empty string", "the output matches it")
    json_schema: dict | str | None = option(None, "schema", _schema, SCHEMA, "the output is JSON that satisfies it")
    choice: Sequence[str] | None = option(
        None, "choice", _choice, "None or a non-empty list of non-empty strings", "the output is one of them"
    )
    grammar: str | None = option(
        None, "text", _text, "None or a non-empty string", "the output satisfies this Lark or GBNF grammar"
    )

    def __post_init__(self) -> None:
        for f in fields(self):
            value, allowed = getattr(self, f.name), f.metadata["allowed"]
            if value is None and allowed.startswith("None"):
                normal = f.metadata["none"]()
            else:
                normal = _checked(f.name, value, allowed, f.metadata["check"])
            object.__setattr__(self, f.name, normal)
        self._check_together()

    def _check_together(self) -> None:
        """Fields that are legal alone but not side by side."""
        shapes = [name for name in ("regex", "json_schema", "choice", "grammar") if getattr(self, name) is not None]
        if len(shapes) > 1:
            allowed = f"None when {shapes[0]} is given: an output has one shape"
            raise ParameterError(shapes[1], getattr(self, shapes[1]), allowed)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.best_of is not None and self.best_of < self.n:
            raise ParameterError("best_of", self.best_of, f"None or an integer from n={self.n} to 128")
        if self.beam_width is None:
            return
        if self.n > self.beam_width:
            raise ParameterError("n", self.n, f"at most beam_width={self.beam_width}")
        off = {"best_of": (None,), "temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
        for name, legal in off.items():
            if getattr(self, name) not in legal:
                allowed = " or ".join(map(str, legal)) + " with beam_width: a beam search does not draw"
                raise ParameterError(name, getattr(self, name), allowed)

    @property
    def greedy(self) -> bool:
        """The likeliest token, lowest id on ties, whatever the other filters say."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1 or self.min_p == 1

    @property
    def scored(self) -> bool:
        """Whether the log-probability of each token is needed, to report it or to choose among best_of."""
        return self.logprobs is not None or self.best_of is not None

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse token ids the model does not have; vocab_size is the model's, padded ids included."""
        for name, tokens in {"logit_bias": self.logit_bias, "stop_token_ids": self.stop_token_ids}.items():
            for token in tokens:
                if token >= vocab_size:
                    raise ParameterError(name, token, f"a token id below the vocabulary size {vocab_size}")


class NonFiniteLogits(ValueError):
    """The model's logits of one row hold NaN or +inf, or -inf only: no token of it means anything."""


class NoTokenLeft(ValueError):
    """The row's own constraints (mask, bias) forbid every token."""


def uniform(seed: int, choice: int, position: int, stream: int = 0) -> float:
    """A number in [0, 1), 53 bits of it, that only depends on its arguments.

    position counts the request's own output tokens, choice its parallel samples. Uses that must be independent of each
    other at one position take different streams: 0 draws the token, others are for speculation's guesses and verdicts.
    """
    digest = hashlib.blake2b(struct.pack("<Qqqq", seed % 2**64, choice, position, stream), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


class SamplerState:
    """What sampling remembers of one sequence: its output and which tokens it has seen how often.

    The counts grow with commit() and shrink with truncate(), a token at a time; no step recounts the history. `tokens`
    lists what was seen in the order of first sight, so undoing the last commits pops from its end:

        prompt [7, 3], output 5 3 5       slot    0  1  2
                                          token   7  3  5       truncate(1) -> 5 counted once, 3 counted 0 times:
                                          count   0  1  2                      it stays, for the prompt showed it
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        choice: int = 0,
        seed: int | None = None,
        eos_token_ids: Sequence[int] = (),
    ):
        """`seed` stands in when params.seed is None; without either, one is drawn. Choices of a request share it."""
        self.params = params
        self.choice = choice
        fallback = secrets.randbits(63) if seed is None else seed
        self.seed = fallback if params.seed is None else params.seed
        self.output: list[int] = []
        self._ends = set() if params.ignore_eos else set(eos_token_ids)  # EOS that is ignored ends nothing
        self.stop_ids = torch.tensor(sorted(self._ends | set(params.stop_token_ids)), dtype=torch.int64)  # [stops]
        self._bias_ids = torch.tensor(list(params.logit_bias), dtype=torch.int64)  # [biased]
        self._bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)  # [biased]
        self._counting = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1)
        # Only the repetition penalty looks at the prompt; without it the prompt is not even read.
        seen = list(dict.fromkeys(prompt_ids)) if params.repetition_penalty != 1 else []
        self._slots = {token: slot for slot, token in enumerate(seen)}
        self._prompt_slots = len(seen)
        self._tokens = torch.tensor([*seen, *[0] * 64], dtype=torch.int64)  # [capacity], the first len(_slots) valid
        self._counts = torch.zeros(len(self._tokens))  # [capacity], occurrences in the output

    @property
    def n_output(self) -> int:
        return len(self.output)

    def uniform(self, stream: int = 0) -> float:
        """The random number of the next token of this choice (see `uniform`)."""
        return uniform(self.seed, self.choice, len(self.output), stream)

    def commit(self, token: int) -> None:
        """`token` has become part of the output."""
        self.output.append(token)
        if not self._counting:
            return
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._tokens):
            self._tokens = torch.cat([self._tokens, torch.zeros_like(self._tokens)])
            self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
        self._tokens[slot] = token
        self._counts[slot] += 1

    def truncate(self, n_output: int) -> None:
        """Forget all but the first `n_output` tokens of the output."""
        if not 0 <= n_output <= len(self.output):
            raise ValueError(f"cannot truncate an output of {len(self.output)} tokens to {n_output}")
        while len(self.output) > n_output:
            token = self.output.pop()
            if not self._counting:
                continue
            slot = self._slots[token]
            self._counts[slot] -= 1
            if slot >= self._prompt_slots and self._counts[slot] == 0:
                del self._slots[token]  # the last slot: whatever was first seen later is undone already

    def fork(self, choice: int | None = None) -> "SamplerState":
        """An independent copy, for another parallel sample (give it its index) or another beam."""
        twin = copy.copy(self)
        twin.choice = self.choice if choice is None else choice
        twin.output, twin._slots = self.output.copy(), self._slots.copy()
        twin._tokens, twin._counts = self._tokens.clone(), self._counts.clone()
        return twin

    def touches(self) -> bool:
        """Whether `constrain` would change the next row of logits, masks aside."""
        waiting = len(self.output) < self.params.min_tokens and len(self.stop_ids) > 0
        return waiting or bool(self._slots) or len(self._bias) > 0

    def constrain(self, row: torch.Tensor, mask: torch.Tensor | None) -> None:
        """Bias, penalties and bans on one row of logits [V], in place; bans come last so that nothing lifts them."""
        if len(self._bias):
            row.index_add_(0, self._bias_ids.to(row.device), self._bias.to(row.device))
        if self._slots:
            self._penalise(row)
        if mask is not None:
            if mask.dtype != torch.bool or len(mask) > len(row):
                raise ValueError(f"a mask is bool over up to {len(row)} tokens, not {mask.dtype} over {len(mask)}")
            row[: len(mask)].masked_fill_(~mask.to(row.device), -math.inf)
            row[len(mask) :] = -math.inf  # padded ids the tokenizer does not have
        if len(self.output) < self.params.min_tokens and len(self.stop_ids):
            ids = self.stop_ids[self.stop_ids < len(row)].to(row.device)  # a tokenizer's EOS may lie beyond the model
            stops = row[ids]
            row[ids] = -math.inf
            if row.amax() == -math.inf:  # a complete structured output must end, min_tokens or not
                ends = torch.tensor([i in self._ends for i in ids.tolist()], device=row.device)
                row[ids[ends]] = stops[ends]

    def _penalise(self, row: torch.Tensor) -> None:
        params, seen = self.params, len(self._slots)
        ids, counts = self._tokens[:seen].to(row.device), self._counts[:seen].to(row.device)  # [seen]
        before = row[ids]
        # A penalty must make a token less likely: dividing would raise a negative logit.
        logits = torch.where(before < 0, before * params.repetition_penalty, before / params.repetition_penalty)
        logits = logits - (params.frequency_penalty * counts + params.presence_penalty * (counts > 0))
        most = torch.finfo(row.dtype).max  # an extreme penalty saturates: it neither overflows nor forbids
        row[ids] = torch.where(before == -math.inf, before, logits.clamp_(-most, most))


def process_logits(
    logits: torch.Tensor, states: Sequence[SamplerState], masks: Sequence[torch.Tensor | None] | None = None
) -> torch.Tensor:
    """Raw logits [R, V] -> float32 logits [R, V] with each row's bias, penalties, mask and min_tokens applied.

    masks: per row None or a bool tensor of up to V tokens, True = allowed; ids past its end are forbidden. The input is
    never changed; it is returned itself (if contiguous float32) when no row asks for anything.
    """
    masks = [None] * len(states) if masks is None else masks
    if not len(logits) == len(states) == len(masks):
        raise ValueError(f"{len(logits)} rows of logits, {len(states)} states, {len(masks)} masks: one of each per row")
    processed = logits.float().contiguous()
    touched = _touched(states, masks)
    if touched and processed is logits:
        processed = logits.clone()
    for r in touched:
        states[r].constrain(processed[r], masks[r])
    return processed


def _touched(states: Sequence[SamplerState], masks: Sequence[torch.Tensor | None]) -> list[int]:
    """Whose rows `constrain` would change."""
    return [i for i, state in enumerate(states) if masks[i] is not None or state.touches()]


def argmax(logits: torch.Tensor, rows: Sequence[int] | None = None) -> tuple[list[float], list[int]]:
    """Largest value and its lowest id, of each row of [R, V] or of those asked for; a row with a NaN has NaN.

    In main memory by numpy, whose argmax is vectorised and needs no copy of the rows: torch's is not, and after a model
    step every further operation runs code that is no longer in a cache. Elsewhere in two stages, so that all threads of
    a GPU have something to do: the first best block, then the first best token in it.
    """
    every = range(len(logits))
    rows = every if rows is None else rows
    if logits.device.type == "cpu":
        table = logits.numpy()
        ids = [int(table[r].argmax()) for r in rows]
        return [float(table[r, i]) for r, i in zip(rows, ids, strict=True)], ids
    chosen = logits if list(rows) == list(every) else logits[list(rows)]
    block = math.gcd(logits.shape[1], 256)
    blocks = chosen.unflatten(1, (-1, block))  # [R, vocab / block, block]
    best, best_block = blocks.amax(-1).max(-1)  # [R]; amax and max carry NaN along
    inside = blocks[torch.arange(len(blocks), device=logits.device), best_block]  # [R, block]
    return best.tolist(), (best_block * block + inside.argmax(-1)).tolist()


def best_ids(row: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the k largest of [V], largest first, ties by id: the first k of a full stable sort, without the sort."""
    k = min(k, len(row))
    values, ids = row.topk(min(k + 1, len(row)))
    if len(ids) > k and values[k - 1] == values[k]:  # a tie across the border, and topk breaks ties as it likes
        ids = (row >= values[k - 1]).nonzero().squeeze(1)
    else:
        ids = ids[:k].sort().values
    return ids[row[ids].sort(descending=True, stable=True).indices[:k]]


def _filter(row: torch.Tensor, ticks: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Ticks [V] with those zeroed that min_p, then top_k, then top_p drop. The best token always stays."""
    if params.min_p > 0:
        ticks = torch.where(ticks >= params.min_p * TICKS, ticks, 0)
    if 0 < params.top_k < len(row):
        ids = best_ids(row, params.top_k)
        kept = ticks[ids]  # [top_k], best first
        if params.top_p < 1:
            reach = kept.cumsum(0, dtype=torch.float64)
            kept[int(torch.searchsorted(reach, params.top_p * reach[-1])) + 1 :] = 0
        return torch.zeros_like(ticks).index_copy_(0, ids, kept)
    return _nucleus(row, ticks, params.top_p) if params.top_p < 1 else ticks


def _nucleus(row: torch.Tensor, ticks: torch.Tensor, top_p: float) -> torch.Tensor:
    """Ticks [V] of the shortest run of best tokens that reaches top_p of the whole mass; 0 elsewhere.

    Sorting into buckets needs no comparisons, and only the bucket in which the goal is reached is sorted inside:

        bucket     ...  90      89       88      87  ...        bits of a positive float, read as an integer, are in
        mass           | 40 |   31    |  22   |  5 ...          order: the upper ones (exponent, 4 bits of mantissa)
        top_p=0.8       kept   kept    sorted  dropped          number the buckets
    """
    bucket = (ticks.view(torch.int32) >> 19).long()  # [V]
    mass = torch.zeros(BUCKETS, dtype=torch.float64, device=ticks.device).scatter_add_(0, bucket, ticks.double())
    reach = mass.flip(0).cumsum(0)  # [BUCKETS], from the best down
    goal = top_p * reach[-1]
    place = int(torch.searchsorted(reach, goal))
    border = BUCKETS - 1 - place
    ids = (bucket == border).nonzero().squeeze(1)
    ids = ids[row[ids].sort(descending=True, stable=True).indices]
    inside = reach[place] - mass[border] + ticks[ids].cumsum(0, dtype=torch.float64)
    ids = ids[: int(torch.searchsorted(inside, goal)) + 1]
    return torch.where(bucket > border, ticks, 0).index_copy_(0, ids, ticks[ids])


def _ticks(row: torch.Tensor, best: float, temperature: float) -> torch.Tensor:
    """Weights [V] of a row at a temperature, whole numbers as float32. Less the best first, so nothing overflows."""
    return (row - best).div_(temperature).exp_().mul_(TICKS).round_()


def draw(weights: torch.Tensor, u: float) -> int:
    """Index i of [N] with probability weights[i] / sum, decided by u in [0, 1). Weights >= 0, not all 0."""
    reach = weights.cumsum(0, dtype=torch.float64)
    # u <= 1 - 2**-53, so the product stays below the sum even after rounding, and index N cannot come out.
    return int(torch.searchsorted(reach, u * reach[-1], right=True))


def row_errors(raw: torch.Tensor, processed: torch.Tensor) -> list[ValueError | None]:
    """Per row of [R, V] why nothing can be drawn from it, or None. A bad row is an error of its own request only."""
    best = zip(raw.amax(-1).tolist(), processed.amax(-1).tolist(), strict=True)  # amax carries NaN along
    return [_row_error(*pair) for pair in best]


def _row_error(raw_best: float, processed_best: float) -> ValueError | None:
    if not math.isfinite(raw_best):
        what = {math.inf: "+inf", -math.inf: "-inf only"}.get(raw_best, "NaN")
        remedy = "a 16-bit dtype may have overflowed: load the model as bfloat16 or float32, and check its weights"
        return NonFiniteLogits(f"the model's logits hold {what}; {remedy}")
    if not math.isfinite(processed_best):
        return NoTokenLeft("the mask, logit_bias and the model's own -inf together forbid every token")
    return None


def probabilities(logits: torch.Tensor, states: Sequence[SamplerState]) -> torch.Tensor:
    """The distribution `sample` draws from, float64 [R, V], of PROCESSED logits (process_logits).

    Raises NonFiniteLogits or NoTokenLeft for a row without one; ask row_errors first where neighbours must go on.
    """
    logits = logits.float().contiguous()
    values, ids = argmax(logits)
    out = torch.zeros(logits.shape, dtype=torch.float64, device=logits.device)  # [R, V]
    for r, state in enumerate(states):
        error = _row_error(0.0 if values[r] == -math.inf else values[r], values[r])  # -inf is what masks write
        if error is not None:
            raise error
        if state.params.greedy:
            out[r, ids[r]] = 1.0
            continue
        ticks = _ticks(logits[r], values[r], state.params.temperature)
        kept = _filter(logits[r], ticks, state.params).double()  # [V]
        out[r] = kept / kept.sum()
    return out


class Sampled(NamedTuple):
    """A token and, where asked for, its log-probability, rank (1 = best) and the best (id, log-probability) pairs."""

    token: int
    logprob: float | None = None
    rank: int | None = None
    top: list[tuple[int, float]] | None = None


def score(row: torch.Tensor, token: int, k: int | None) -> Sampled:
    """log_softmax of one finite row of raw logits [V], read at `token` and, unless k is None, at the k best ids."""
    best = row.amax()
    log_sum = float(best) + math.log((row - best).exp_().sum(dtype=torch.float64))
    value = row[token]
    rank = 1 + int((row > value).sum()) + int((row[:token] == value).sum())
    top = None
    if k is not None:
        ids = best_ids(row, k) if k else row.new_empty(0, dtype=torch.int64)
        top = [(i, x - log_sum) for i, x in zip(ids.tolist(), row[ids].tolist(), strict=True)]
    return Sampled(token, float(value) - log_sum, rank, top)


def sample(
    logits: torch.Tensor,
    states: Sequence[SamplerState],
    masks: Sequence[torch.Tensor | None] | None = None,
    rows: Sequence[int] | None = None,
) -> list[Sampled | ValueError]:
    """The next token of each state, from its row of raw logits [R, V]; states are not changed (commit what you keep).

    rows: which row is whose; every row in turn if not given. A row nothing can be drawn from gets its NonFiniteLogits
    or NoTokenLeft in place of a Sampled. Each row is drawn from on its own, so that no sum sees the batch. Only rows
    that a state changes are copied: a row is 200 kB.
    """
    raw = logits.float().contiguous()
    masks = [None] * len(states) if masks is None else masks
    rows = range(len(raw)) if rows is None else rows
    if not len(rows) == len(states) == len(masks):
        raise ValueError(f"{len(rows)} rows of logits, {len(states)} states, {len(masks)} masks: one of each per row")
    raw_values, tokens = argmax(raw, rows)
    values, places = list(raw_values), [(raw, r) for r in rows]  # of the final rows
    touched = _touched(states, masks)
    if touched:
        processed = raw[[rows[i] for i in touched]]  # a copy
        for i, row in zip(touched, processed, strict=True):
            states[i].constrain(row, masks[i])
        for j, (i, value, token) in enumerate(zip(touched, *argmax(processed), strict=True)):
            values[i], tokens[i], places[i] = value, token, (processed, j)
    errors = [_row_error(*pair) for pair in zip(raw_values, values, strict=True)]
    drawn = [i for i, state in enumerate(states) if errors[i] is None and not state.params.greedy]
    for table in (raw, processed) if touched else (raw,):
        mine = [i for i in drawn if places[i][0] is table]
        found = draw_rows(table, [places[i][1] for i in mine], [values[i] for i in mine], [states[i] for i in mine])
        for i, token in zip(mine, found, strict=True):
            tokens[i] = token
    results: list[Sampled | ValueError] = []
    for error, r, token, state in zip(errors, rows, tokens, states, strict=True):
        plain = error or Sampled(token)
        results.append(score(raw[r], token, state.params.logprobs) if state.params.scored and not error else plain)
    return results


def draw_rows(
    table: torch.Tensor, rows: Sequence[int], best: Sequence[float], states: Sequence[SamplerState]
) -> list[int]:
    """A token from each of the `rows` of processed logits [R, V]; best: their largest logits, which are finite.

    By the native kernels where they are in use, else as they define it: row by row, so that no sum sees the batch.
    """
    if kernels.backend() == "native" and table.device.type == "cpu" and rows:
        asked = []
        for value, state in zip(best, states, strict=True):
            p = state.params
            top_k = min(p.top_k, table.shape[1])  # which may be a number that no float holds
            asked.append((value, p.temperature, p.min_p, top_k, p.top_p, state.uniform()))
        return kernels_native.draw(table, rows, asked)
    tokens = []
    for r, value, state in zip(rows, best, states, strict=True):
        ticks = _ticks(table[r], value, state.params.temperature)
        tokens.append(draw(_filter(table[r], ticks, state.params), state.uniform()))
    return tokens


def prompt_logprobs(logits: torch.Tensor, targets: Sequence[int], k: int) -> list[Sampled | ValueError]:
    """How likely each of the n known tokens was: row i of raw logits [n, V] predicted targets[i]; k best beside it.

    Rows do not see each other: any slicing of a prompt into chunks gives the same numbers. The first token of a prompt
    has no row. A row of NaN, +inf or only -inf holds its NonFiniteLogits.
    """
    raw = logits.float().contiguous()
    errors = row_errors(raw, raw)
    return [
        score(row, token, k) if error is None else error for row, token, error in zip(raw, targets, errors, strict=True)
    ]


def beam_step(logprobs: torch.Tensor, scores: Sequence[float], n: int) -> list[tuple[int, int, float]]:
    """The n best continuations of B beams: next token's logprobs [B, V], scores [B] so far -> (beam, token, score).

    Best first; ties go to the lower beam, then the lower id; impossible ones (-inf) are not returned. Ask for 2B: even
    if each beam's best is EOS and leaves the search, B others remain to go on with.
    """
    total = logprobs.double() + torch.tensor(scores, dtype=torch.float64, device=logprobs.device)[:, None]  # [B, V]
    flat = total.flatten()
    ids = best_ids(flat, n)
    pairs = zip(ids.tolist(), flat[ids].tolist(), strict=True)
    return [(i // logprobs.shape[1], i % logprobs.shape[1], value) for i, value in pairs if value > -math.inf]


def beam_score(logprob: float, length: int, length_penalty: float = 1.0) -> float:
    """What finished beams are ranked by: summed log-probabilities favour short ones: divide by a power of length."""
    return logprob / max(length, 1) ** length_penalty
