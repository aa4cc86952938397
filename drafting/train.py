"""Train a draft head on texts that the target writes itself, in minutes on two cores.

The problem. A head is judged by how often its guess is the token that the target then draws: it must learn what this
model would say, not what people would. There are only minutes, so every text should teach as much as it can.

The idea. Let the engine answer requests (data/requests.json) under a speculator that guesses nothing, but keeps the
states it is shown (`Recorder`). A drawn token is one sample, but the state after it holds the target's distribution
over all tokens. The head is trained towards this teacher distribution, step after step from its own states:

    head       s_i ── token i ──► s' ── token i+1 ──► s'' ...    tokens as drawn, states of its own
                                  |                   |          cross entropy of the two, over the kept tokens
    target                   p(. | s_i+1)        p(. | s_i+2)    its TOP likeliest tokens, computed once

Sources: texts as in Medusa, Cai et al. 2024 (arXiv:2401.10774, section 2.3.2); distillation, DistillSpec, Zhou et al.
2023 (arXiv:2310.08461); several steps from its own states, HASS, Zhang et al. 2024 (arXiv:2408.15766, section 3.2).
Left out: real conversations, states of earlier layers (EAGLE-3, arXiv:2503.01840), training the table, GPUs.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from drafting.head import EPS, head_shapes, save_head
from engine import Engine
from formats.command_line import warn
from generate import LLM
from model import Transformer
from request import Answer
from sampling import SamplingParams

PART = 64  # texts that are written side by side
TEMPERATURES = (0.0, 0.7)  # both are asked of a model
KINDS = ("chat", "chat", "chat", "story", "story", "summary", "code")
DATA = json.loads((Path(__file__).parent.parent / "data" / "requests.json").read_text(encoding="utf-8"))
TOP = 32  # likeliest tokens of the teacher distribution that are kept
SAY_EVERY = 50  # steps


@dataclass(frozen=True)
class Settings:
    """Everything a head depends on.

    kept: tokens it can guess; width: of its MLP; unroll: guesses trained in a row; dropout: share of the MLP's values.
    """

    model: str = "smollm2"
    quant: str | None = "int4"
    texts: int = 2048
    tokens: int = 160
    steps: int = 1200
    seed: int = 0
    kept: int = 4096
    width: int = 768
    unroll: int = 3
    batch: int = 512
    rate: float = 2e-3
    dropout: float = 0.3

    def __post_init__(self):
        for name in ("texts", "tokens", "steps", "kept", "width", "unroll", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1")
        if not 0 < self.rate < math.inf:
            raise ValueError(f"rate={self.rate}: a positive number")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout}: a share from 0, to less than 1")


# -- texts


def requests(n: int, seed: int) -> list[str]:
    """n requests, the same for the same seed, of all kinds."""
    draw = random.Random(seed)

    def compose(form: str) -> str:
        form = form.replace("{text}", draw.choice(DATA["passages"])).replace("{task}", draw.choice(DATA["tasks"]))
        while "{}" in form:
            form = form.replace("{}", draw.choice(DATA["subjects"]), 1)
        return form

    return [compose(draw.choice(DATA["asked"][KINDS[i % len(KINDS)]])) for i in range(n)]


class Recorder:
    """A speculator that guesses nothing and keeps, for every answer, the states its tokens were drawn from."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.states: dict[Answer, list[Tensor]] = {}

    def propose(self, answers: list[Answer], *_) -> list[list[int]]:
        for answer in answers:
            if answer in self.engine.rows:
                state = self.engine.runner.states[self.engine.rows[answer]]
                self.states.setdefault(answer, []).append(state.half().cpu())
        return [[] for _ in answers]


def write_texts(llm: LLM, texts: int, tokens: int, seed: int) -> dict[str, Tensor]:
    """Answers to requests: tokens int64 [T], the states float16 [T, hidden] they were drawn from, lengths of texts."""
    asked, written = requests(texts, seed), {"tokens": [], "states": [], "lengths": []}
    for start in range(0, texts, PART):
        recorder, answers = Recorder(llm.engine), []
        llm.engine.speculator = recorder
        for i, text in enumerate(asked[start : start + PART], start):
            params = SamplingParams(temperature=TEMPERATURES[i % 2], max_tokens=tokens, seed=(seed << 32) + i)
            ids = llm.tokenizer.encode_chat([{"role": "user", "content": text}])
            answers.append(llm.add(ids, params).answers[0])
        while llm.engine.has_work:
            llm.engine.step()
        for answer in answers:
            if answer.error:
                raise ValueError(f"the model could not answer a request of the training text: {answer.error}")
            # None for an answer that ended at its first token; the last token's state has been overwritten.
            if states := recorder.states.get(answer):
                written["tokens"].append(torch.tensor(answer.token_ids[: len(states)]))
                written["states"].append(torch.stack(states))
                written["lengths"].append(torch.tensor([len(states)]))
        warn(f"texts {start + len(answers):,} of {texts:,}")
    llm.engine.speculator = None
    return {name: torch.cat(parts) for name, parts in written.items()}


# -- training


def first_weights(settings: Settings, hidden: int, scale: float) -> dict[str, Tensor]:
    """float32; at first the next state is nearly the last. scale: how large the target's states are."""
    weights = {}
    for name, shape in head_shapes(hidden, settings.width, settings.kept).items():
        if len(shape) == 2:
            small = 0.1 if name == "down" else 1.0
            weights[name] = torch.randn(shape) * (small / math.sqrt(shape[1]))
        elif name != "kept":
            weights[name] = torch.full(shape, scale if name == "out_norm" else 1.0)
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def head_step(w: dict[str, Tensor], state: Tensor, embedding: Tensor, dropout: float = 0.0) -> Tensor:
    """DraftHead.forward in operations that have gradients: the next state [R, hidden]."""
    both = F.linear(norm(state, w["state_norm"]), w["from_state"])
    gate, up = (both + F.linear(norm(embedding, w["token_norm"]), w["from_token"])).chunk(2, dim=-1)
    return state + F.linear(F.dropout(F.silu(gate) * up, dropout), w["down"])


class Examples:
    """The texts as rows: `tokens`, and the `states` they were drawn from."""

    def __init__(self, texts: dict[str, Tensor], kept: int, target: Transformer):
        self.tokens, self.states = texts["tokens"], texts["states"]
        lengths = texts["lengths"]
        owner = torch.repeat_interleave(lengths)  # [T], text of each row
        self.left = lengths.cumsum(0)[owner] - torch.arange(len(owner)) - 1  # [T], rows of the text that follow
        self.starts = torch.nonzero(self.left > 0).flatten()  # the rows from which the head can be unrolled
        used = self.tokens.bincount()
        order = used.argsort(descending=True, stable=True)[: min(kept, int((used > 0).sum()))]
        self.kept = order.sort().values  # [kept]
        self.table = target.head.lookup(self.kept).float()  # [kept, hidden]
        self.embed = target.embed
        self.teacher = [torch.cat(parts) for parts in zip(*map(self._teacher_of, self.states.split(1024)), strict=True)]

    def _teacher_of(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The chances of the TOP kept tokens [R, TOP], and which they are."""
        top = F.linear(states.float(), self.table).topk(min(TOP, len(self.kept)))
        return top.values.softmax(1), top.indices


def loss_of(w: dict[str, Tensor], ex: Examples, rows: Tensor, settings: Settings) -> Tensor:
    """Cross entropy of the teacher distribution and the head's, summed over the steps, per row of the first.

    Every step of the recurrence goes on with half of the rows before it, since later guesses are made less often.
    """
    total, first, state = torch.zeros(()), rows, ex.states[rows].float()
    for j in range(settings.unroll):
        state = head_step(w, state, ex.embed.lookup(ex.tokens[rows + j]).float(), settings.dropout)
        chances = F.log_softmax(F.linear(norm(state, w["out_norm"]), ex.table), dim=-1)  # [R, kept]
        teacher, where = (part[rows + j + 1] for part in ex.teacher)  # [R, TOP]
        total = total - (teacher * chances.gather(1, where)).sum()
        going_on = torch.nonzero(ex.left[rows] > j + 1).flatten()[: -(-len(rows) // 2)]
        rows, state = rows[going_on], state[going_on]
    return total / len(first)


def fit(ex: Examples, settings: Settings) -> dict[str, Tensor]:
    """The trained weights, from the seed."""
    torch.manual_seed(settings.seed)
    scale = float(ex.states[:1024].float().square().mean().sqrt())
    w = first_weights(settings, ex.states.shape[1], scale)
    optimizer = torch.optim.AdamW(w.values(), lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm = max(1, settings.steps // 20)
    for step in range(settings.steps):  # warm up over a twentieth of them, then a cosine down to nothing
        faded = 0.5 + 0.5 * math.cos(math.pi * step / settings.steps)
        optimizer.param_groups[0]["lr"] = settings.rate * min((step + 1) / warm, faded)
        loss = loss_of(w, ex, ex.starts[torch.randint(len(ex.starts), (settings.batch,))], settings)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        optimizer.step()
        if (step + 1) % SAY_EVERY == 0 or step + 1 == settings.steps:
            warn(f"steps {step + 1:,} of {settings.steps:,}, loss {loss.item():.2f}")
    return {name: weight.detach() for name, weight in w.items()} | {"kept": ex.kept}


def train(out: str | Path, settings: Settings, load: Callable[[], LLM]) -> None:
    """Texts, training, file."""
    llm = load()
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    open(out, "ab").close()  # whoever may not write there shall not wait for it
    texts = write_texts(llm, settings.texts, settings.tokens, settings.seed)
    torch.set_num_threads(kernels.threads())  # an LLM leaves torch one, for the sake of its own kernels
    weights = fit(Examples(texts, settings.kept, llm.model), settings)
    save_head(out, weights, llm.model, settings.model, asdict(settings))
