"""A trained draft head: a small recurrent network that goes on from where the target's last hidden state stands.

The problem. A draft model reads a model's weights for every guess and keeps a cache of its own. But the target's last
hidden state, from which the next token was drawn, mostly knows the one after it as well, but for which token that was.

The idea. Learn one small step, from a state and the token that was drawn from it to the next state, and read every
state with the target's own output table, cut down to the tokens that the training text used most:

    target  ... "sat" ──► s0 ── head ──► "on" drawn           (a step of the target: 97 MB of weights)
    guess 1   s0, "on"  ──► s1 ── table ──► "the"             (a round of the head: 4.6 MB)
    guess 2   s1, "the" ──► s2 ── table ──► "mat"

    s' = s + down · silu_gate( from_state · norm(s) + from_token · norm(embedding of the token) )

Sources: recurrent drafting, Zhang et al. 2024 (arXiv:2403.09919, section 3.1); states as input, EAGLE, Li et al. 2024
(arXiv:2401.15077); the reduced table, FR-Spec, Zhao et al. 2025 (arXiv:2502.14856). Left out: trees of guesses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from math import log2
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from drafting.budget import StepCost
from engine import Engine
from model import Transformer
from quantize import INT8, Linear, PackedLinear, quantize_rows
from request import Answer
from sampling import argmax

SHIPPED = Path(__file__).parent.parent / "data" / "smollm2_head.safetensors"  # for the default model
KEY, VERSION = "vitrine_draft_head", 1  # metadata entry of the file
ENTRIES = {"target": str, "fingerprint": str, "hidden": int, "vocab": int, "kept": int, "training": dict}  # in it
EPS = 1e-5  # of the head's norms


def head_shapes(hidden: int, width: int, kept: int) -> dict[str, tuple[int, ...]]:
    """What a head's file holds; gate and up are rows under rows, as in model.py."""
    return {
        "state_norm": (hidden,),
        "token_norm": (hidden,),
        "out_norm": (hidden,),
        "from_state": (2 * width, hidden),
        "from_token": (2 * width, hidden),
        "down": (hidden, width),
        "kept": (kept,),  # int32, ids of the tokens it can guess
    }


def fingerprint(model: Transformer) -> str:
    """Tells models of one shape apart by their norms, which every quantisation and container leaves alone."""
    norms = [norm for norm in model.parameters() if len(norm) == model.config.hidden_size]
    values = torch.stack(norms).to(torch.bfloat16).view(torch.int16).cpu()  # 16 bits: the least any file holds
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]


def save_head(path: str | Path, weights: dict[str, Tensor], target: Transformer, name: str, training: dict) -> None:
    """Write a head's weights (float16) with what it was trained for and how; `name` is the target's."""
    about = {"version": VERSION, "target": name, "fingerprint": fingerprint(target), "training": training}
    about |= {"hidden": target.config.hidden_size, "vocab": target.config.vocab_size, "kept": len(weights["kept"])}
    halves = {k: v.detach().to(torch.int32 if k == "kept" else torch.float16).contiguous() for k, v in weights.items()}
    save_file(halves, str(path), {KEY: json.dumps(about)})


def read_head(path: str | Path) -> tuple[dict[str, Tensor], dict]:
    """The weights of a head and what its file says about it. Raises ValueError if it is no such file."""
    again = "train one: python speculative.py train --model M --out F"
    try:
        with safe_open(str(path), framework="pt") as file:
            entry = (file.metadata() or {}).get(KEY, "{}")
            weights = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"draft head {path} cannot be read ({error}): get it again, or {again}") from None
    try:
        about = dict(json.loads(entry))
    except (ValueError, TypeError, RecursionError):
        about = {}
    if about.get("version") != VERSION:
        raise ValueError(f"{path} is no draft head of version {VERSION}: it has no such {KEY} entry in its header")
    if fault := next(faults(weights, about), None):
        raise ValueError(f"draft head {path} is damaged: {fault}; get it again, or {again}")
    return weights, about


def faults(weights: dict[str, Tensor], about: dict) -> Iterator[str]:
    """What is wrong with a head's file; each is looked for only where nothing was wrong before."""
    for name, kind in ENTRIES.items():
        value = about.get(name)
        if type(value) is not kind or kind is int and value < 1:
            wanted = "positive number" if kind is int else kind.__name__
            yield f"the {name!r} of its {KEY} entry is {repr(value)[:60]}, no {wanted}"
    width = weights["down"].shape[-1] if "down" in weights and weights["down"].dim() else 0
    shapes = head_shapes(about["hidden"], width, about["kept"])
    for name in sorted(shapes.keys() | weights.keys()):
        right = name in shapes and f"{torch.int32 if name == 'kept' else torch.float16} {list(shapes[name])}"
        found = name in weights and f"{weights[name].dtype} {list(weights[name].shape)}"
        if right != found:
            yield f"its tensor {name!r} is {found or 'missing'}, not {right or 'one of a head'}"
        if not torch.isfinite(weights[name]).all():
            yield f"its tensor {name!r} holds NaN or infinity"
    if not 0 <= int(weights["kept"].min()) <= int(weights["kept"].max()) < about["vocab"]:
        yield "it keeps tokens outside the vocabulary"


def load_head(path: str | Path, target: Transformer) -> DraftHead:
    """The head in a file, for this target. Raises ValueError if it was trained for another."""
    weights, about = read_head(path)
    ours = {"hidden": target.config.hidden_size, "vocab": target.config.vocab_size, "fingerprint": fingerprint(target)}
    for name, value in ours.items():
        if about[name] != value:
            raise ValueError(
                f"draft head {path} was trained for {about['target']!r}, {name} {about[name]}; this model has {value}: "
                "train one for it (python speculative.py train --model M --out F), or use speculate='ngram'"
            )
    return DraftHead(weights, target)


class DraftHead(nn.Module):
    """One step of the recurrence: state [R, hidden], token [R] -> next state [R, hidden], logits [R, kept].

    Its products have 8 bits where the target's are quantised, so that the native kernels compute them.
    """

    def __init__(self, weights: dict[str, Tensor], target: Transformer):
        super().__init__()
        self.embed, self.dtype = target.embed, target.dtype
        dense, device = type(target.embed) is Linear, target.norm.weight.device

        def layer(weight: Tensor) -> nn.Module:
            if dense:
                return Linear(weight.to(device, self.dtype))
            return PackedLinear(quantize_rows(weight.float().cpu(), INT8)).to(device)

        self.kept = weights["kept"].long().to(device)
        self.from_state, self.from_token, self.down = (layer(weights[n]) for n in ("from_state", "from_token", "down"))
        self.table = layer(target.head.lookup(self.kept))
        norms = (weights[n].to(device, self.dtype) for n in ("state_norm", "token_norm", "out_norm"))
        self.state_norm, self.token_norm, self.out_norm = norms

    def forward(self, state: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
        embedding = self.embed.lookup(token).to(self.dtype)  # [R, hidden]
        both = self.from_token(embedding, norm_weight=self.token_norm, eps=EPS)  # [R, 2 width]
        both = self.from_state(state, norm_weight=self.state_norm, eps=EPS, residual=both)
        state = self.down(torch.ops.vitrine.silu_mul(both), residual=state)
        return state, self.table(state, norm_weight=self.out_norm, eps=EPS).float()


def strength_of(chance: float) -> int:
    """Odds as a strength: 0 below a chance of 1/3, then 1, 2, 4, 8, 16 as they double (`Record` starts from s : 1)."""
    if not chance > 1 / 3:
        return 0
    chance = min(chance, 0.99)
    return 2 ** min(4, max(0, int(log2(chance / (1 - chance)))))


def computed_anew(run: Callable[[], Tensor]) -> tuple[Tensor, Callable]:
    """A capture where nothing can be recorded (compiled.py has what can): the output, and a call that renews it."""
    output = run()
    return output, lambda: output.copy_(run())


class HeadProposer:
    """Proposes what a draft head says of the states that `engine` drew from. capture: as for CapturedRunner."""

    ROUNDS_TO_ASK = 1
    TRUST = 20.0  # for the Speculator: the strength says it already, whatever the answer

    def __init__(self, head: DraftHead, engine: Engine, capture=computed_anew):
        self.head, self.engine, self.rows, self.capture = head, engine, engine.rows, capture
        self.ids, self.device = head.kept.tolist(), head.kept.device
        # After a step of the target, torch's dispatch runs with cold caches: an operation takes 50 microseconds.
        self.by_numpy = head.dtype is torch.float32 and self.device.type == "cpu"
        self.recorded: dict[int, tuple[Tensor, Tensor, Tensor, Callable]] = {}
        self.first: dict[Answer, tuple[int, float, int]] = {}  # guess, its chance, its row of `states`
        self.states: Tensor | None = None  # [R, hidden] after the first round

    def strength(self, answers: list[Answer]) -> list[int]:
        able, self.first = [answer for answer in answers if answer in self.rows], {}
        if able:
            rows, tokens = [self.rows[answer] for answer in able], [answer.seq.tokens[-1] for answer in able]
            self.states, guesses = self.round(self.engine.runner.states, rows, tokens)
            self.first = {answer: (*guess, i) for i, (answer, guess) in enumerate(zip(able, guesses, strict=True))}
        return [strength_of(self.first[answer][1]) if answer in self.first else 0 for answer in answers]

    def propose(self, answers: list[Answer], limits: list[int]) -> list[list[int]]:
        """A limit of n says that n guesses like the first are worth their rows: so is a run with that chance."""
        guesses: list[list[int]] = [[] for _ in answers]
        going_on = []  # (number of the answer, chance that all its guesses are right, least worth a row, row)
        for i, (answer, limit) in enumerate(zip(answers, limits, strict=True)):
            if limit and answer in self.first:
                token, chance, row = self.first[answer]
                guesses[i].append(token)
                going_on.append((i, chance, chance**limit, row))
        states = self.states
        while going_on := [entry for entry in going_on if len(guesses[entry[0]]) < limits[entry[0]]]:
            states, more = self.round(states, [row for *_, row in going_on], [guesses[i][-1] for i, *_ in going_on])
            asked, going_on = going_on, []
            for row, ((i, chance, least, _), (token, next_chance)) in enumerate(zip(asked, more, strict=True)):
                if chance * next_chance >= least:
                    guesses[i].append(token)
                    going_on.append((i, chance * next_chance, least, row))
        return guesses

    def backlog(self, answer: Answer) -> int:
        return 0

    def round(self, states: Tensor, rows: list[int], tokens: list[int]) -> tuple[Tensor, list[tuple[int, float]]]:
        """A guess, with its chance, behind each token and the row of `states` it was drawn from; and the next states.

        The next round of as many rows overwrites them.
        """
        token, state, logits, replay = self.recorded.get(len(rows)) or self.record(len(rows))
        if self.by_numpy:
            token.numpy()[:], state.numpy()[:] = tokens, states.numpy()[rows]
        else:
            token.copy_(torch.tensor(tokens))
            state.copy_(states[rows])
        replay()
        values, best = argmax(logits, range(len(logits)))
        if self.by_numpy:
            totals = np.exp(logits.numpy() - np.array(values, np.float32)[:, None]).sum(1).tolist()
        else:
            totals = (logits - torch.tensor(values, device=self.device)[:, None]).exp().sum(1).tolist()
        return state, [(self.ids[i], 1 / total) for i, total in zip(best, totals, strict=True)]

    def record(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Callable]:
        token = torch.zeros(rows, dtype=torch.int64, device=self.device)
        state = torch.zeros(rows, self.engine.model.config.hidden_size, dtype=self.head.dtype, device=self.device)

        def run() -> Tensor:
            after, logits = self.head(state, token)
            state.copy_(after)
            return logits

        self.recorded[rows] = token, state, *self.capture(run)
        return self.recorded[rows]

    @torch.inference_mode()
    def measure(self, most: int, before: Callable[[], object] = lambda: None) -> StepCost:
        """Seconds of a round of 1 to `most` answers, each timed right after `before`: a step of the target, say."""
        shape = max(2, most), self.engine.model.config.hidden_size  # two rows are always timed
        states = torch.zeros(shape, dtype=self.head.dtype, device=self.device)
        return StepCost.measure(lambda rows: self.round(states, list(range(rows)), [0] * rows), most, before=before)
