"""What a request may ask of sampling: one frozen record, in which nothing illegal can exist.

The problem. A field that is accepted and then ignored, coerced or misread is the worst kind of wrong: `top_p=True` runs
as 1, `max_tokens="256"` fails deep in a step and takes the batch along, `logit_bias={"AI": 5}` kills an engine.

The idea. Every field is checked when the record is made, before anything is scheduled, and stored in one normal form.
Two tables hold the rules of the numbers, so that the check, the error text and this documentation cannot drift apart:

    SamplingParams(top_p=1.5, ...)  --> table row "top_p": legal? --no--> ParameterError: top_p=1.5 is not allowed:
                                                             |            it must be a number in (0, 1] (1 is off)
                                                            yes --> float, int, tuple or dict, never changed again

What depends on the model waits for check_vocab. The names and ranges are vLLM's and the OpenAI API reference's.

Left out: what regex, json_schema and choice mean (structured.py decides that); limits by context length (the engine's).
No torch: a server can refuse a request without it.
"""

import copy
import json
import math
import numbers
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


# field: (is it legal, what is allowed). Both tables are read by SamplingParams at construction.
_REALS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda v: 0 <= v <= 1e6, "a number in [0, 1e6] (0 is greedy)"),
    "top_p": (lambda v: 0 < v <= 1, "a number in (0, 1] (1 is off)"),
    "min_p": (lambda v: 0 <= v <= 1, "a number in [0, 1] (0 is off)"),
    "presence_penalty": (lambda v: -2 <= v <= 2, "a number in [-2, 2] (0 is off)"),
    "frequency_penalty": (lambda v: -2 <= v <= 2, "a number in [-2, 2] (0 is off)"),
    "repetition_penalty": (lambda v: 1e-4 <= v <= 1e4, "a number in [1e-4, 1e4] (1 is off)"),
}
_INTEGERS: dict[str, tuple[int, float, bool, str]] = {  # field: (least, most, None allowed, what is allowed)
    "n": (1, 128, False, "an integer from 1 to 128"),
    "best_of": (1, 128, True, "None or an integer from n to 128"),
    "beam_width": (1, 64, True, "None or an integer from 1 to 64"),
    "top_k": (-1, math.inf, False, "an integer >= 1, or 0 or -1 for off"),
    "max_tokens": (0, math.inf, True, "None (up to the context) or an integer >= 0 (0 only scores the prompt)"),
    "min_tokens": (0, math.inf, False, "an integer >= 0"),
    "seed": (-(2**63), 2**63 - 1, True, "None or an integer of 64 bits"),
    "logprobs": (0, 20, True, "None or an integer from 0 to 20"),
    "prompt_logprobs": (0, 20, True, "None or an integer from 0 to 20"),
}
_SWITCHES = ("ignore_eos", "include_stop_str_in_output")


@dataclass(frozen=True)
class SamplingParams:
    """What one request asks for, checked and normalised at construction; ParameterError (a ValueError) names the field.

    max_tokens is 16 as in vLLM; None runs up to the context, or as far as the KV memory reaches if that is less; 0
    generates nothing (the prompt is only scored).
    min_tokens bans every EOS and stop id until so many tokens are out; under ignore_eos EOS is not banned, but a token
    like any other.
    `stop` and `stop_token_ids` become tuples, `logit_bias` a dict with int keys (OpenAI's JSON can only send strings).
    regex, json_schema (a dict, or its JSON text) and choice each shape the output; at most one may be given.
    best_of draws that many choices and keeps the n of best mean log-probability. beam_width searches instead of
    sampling; so it takes neither best_of nor temperature, top_p, top_k, min_p other than their defaults (or greedy).
    """

    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int | str, float] | None = None
    regex: str | None = None
    json_schema: dict | str | None = None
    choice: Sequence[str] | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {}
        for field, (legal, allowed) in _REALS.items():
            checked[field] = _real(field, getattr(self, field), legal, allowed)
        for field, rule in _INTEGERS.items():
            checked[field] = _integer(field, getattr(self, field), *rule)
        for field in _SWITCHES:
            if not isinstance(getattr(self, field), bool):
                raise ParameterError(field, getattr(self, field), "True or False")
        stop = (self.stop,) if isinstance(self.stop, str) else () if self.stop is None else self.stop
        checked["stop"] = _strings("stop", stop, "None, a non-empty string or a list of non-empty strings")
        checked["stop_token_ids"] = _token_ids(() if self.stop_token_ids is None else self.stop_token_ids)
        checked["logit_bias"] = _bias({} if self.logit_bias is None else self.logit_bias)
        checked |= _shape_of_output(self.regex, self.json_schema, self.choice)
        for field, value in checked.items():
            object.__setattr__(self, field, value)
        self._check_together()

    def _check_together(self) -> None:
        """Fields that are legal alone but not side by side."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.best_of is not None and self.best_of < self.n:
            raise ParameterError("best_of", self.best_of, f"None or an integer from n={self.n} to 128")
        if self.beam_width is None:
            return
        if self.n > self.beam_width:
            raise ParameterError("n", self.n, f"at most beam_width={self.beam_width}")
        off = {"best_of": (None,), "temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
        for field, legal in off.items():
            if getattr(self, field) not in legal:
                allowed = " or ".join(map(str, legal)) + " with beam_width: a beam search does not draw"
                raise ParameterError(field, getattr(self, field), allowed)

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
        for field, tokens in {"logit_bias": self.logit_bias, "stop_token_ids": self.stop_token_ids}.items():
            for token in tokens:
                if token >= vocab_size:
                    raise ParameterError(field, token, f"a token id below the vocabulary size {vocab_size}")


def _real(field: str, value: Any, legal: Callable[[float], bool], allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ParameterError(field, value, allowed)
    try:
        number = float(value)
    except OverflowError:  # an int beyond float range
        number = math.inf
    if not legal(number):  # every range is bounded, and NaN lies in none
        raise ParameterError(field, value, allowed)
    return number


def _integer(field: str, value: Any, least: int, most: float, optional: bool, allowed: str) -> int | None:
    if value is None and optional:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not least <= value <= most:
        raise ParameterError(field, value, allowed)
    return int(value)


def _strings(field: str, value: Any, allowed: str) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not all(isinstance(text, str) and text for text in value):
        raise ParameterError(field, value, allowed)
    return tuple(value)


def _token_ids(value: Any) -> tuple[int, ...]:
    allowed = "None or a list of token ids, each an integer >= 0"
    if not isinstance(value, (list, tuple)):
        raise ParameterError("stop_token_ids", value, allowed)
    return tuple(_integer("stop_token_ids", token, 0, math.inf, False, allowed) for token in value)


def _bias(value: Any) -> dict[int, float]:
    """Token id -> bias. Keys as integers, or as strings of plain digits, for JSON has no other keys."""
    allowed = "None or a dict from token ids (integers >= 0) to numbers in [-100, 100]"
    if not isinstance(value, Mapping):
        raise ParameterError("logit_bias", value, allowed)
    bias: dict[int, float] = {}
    for key, number in value.items():
        token = int(key) if isinstance(key, str) and re.fullmatch(r"[0-9]{1,18}", key) else key
        token = _integer("logit_bias", token, 0, math.inf, False, allowed)
        if token in bias:
            raise ParameterError("logit_bias", value, f"given once for each token, and {token} occurs twice")
        bias[token] = _real("logit_bias", number, lambda v: abs(v) <= 100, f"a number in [-100, 100] for token {token}")
    return bias


def _shape_of_output(regex: Any, json_schema: Any, choice: Any) -> dict[str, Any]:
    """regex, json_schema and choice, each of the right type and only one given. What they mean is structured.py's."""
    given = {"regex": regex, "json_schema": json_schema, "choice": choice}
    names = [field for field, value in given.items() if value is not None]
    if len(names) > 1:
        raise ParameterError(names[1], given[names[1]], f"None when {names[0]} is given: an output has one shape")
    if regex is not None and not (isinstance(regex, str) and regex):
        raise ParameterError("regex", regex, "None or a non-empty string")
    if choice is not None:
        allowed = "None or a non-empty list of non-empty strings"
        given["choice"] = _strings("choice", choice or None, allowed)
    if json_schema is not None:
        allowed = "None, a JSON Schema as a dict, or the JSON text of one"
        schema = json_schema
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise ParameterError("json_schema", json_schema, f"{allowed}; this is no JSON ({error})") from None
        if not isinstance(schema, dict):
            raise ParameterError("json_schema", json_schema, allowed)
        try:
            given["json_schema"] = copy.deepcopy(schema)  # the caller may go on editing theirs
        except RecursionError:
            raise ParameterError("json_schema", json_schema, f"{allowed}; this one is nested too deeply") from None
    return given
