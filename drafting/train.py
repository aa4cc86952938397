"""Train a draft head on texts that the target wrote itself, in minutes on two cores; measure it on others.

    python speculative.py train --out head.safetensors            texts, then steps of training
    python speculative.py measure --speculate head:head.safetensors

The problem. A head is judged by one thing: how often its guess is the token that the target then draws. There are only
minutes to teach it that, so every text should teach as much as it can.

The idea. A drawn token is one sample, but the state after it holds the target's distribution over all tokens. The head
is trained towards this teacher distribution, step after step from its own states, later steps on fewer rows:

    head       s_i ── token i ──► s' ── token i+1 ──► s'' ...    tokens as drawn, states of its own
                                  |                   |          cross entropy of the two, over the kept tokens
    target                   p(. | s_i+1)        p(. | s_i+2)    its TOP likeliest tokens, computed once

Sources: distillation, Hinton et al. 2015 (arXiv:1503.02531, section 2), for drafts DistillSpec, Zhou et al. 2023
(arXiv:2310.08461); several steps from its own states, HASS, Zhang et al. 2024 (arXiv:2408.15766, section 3.2).
Left out: states of earlier layers (EAGLE-3, arXiv:2503.01840), training the table, mixed precision, GPUs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from drafting.head import EPS, head_shapes, save_head
from drafting.measure import run_measure
from drafting.texts import HELD_OUT, write_texts
from formats.command_line import as_command, warn
from generate import LLM
from model import Transformer

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


def first_weights(settings: Settings, hidden: int, scale: float) -> dict[str, Tensor]:
    """float32; at first the next state is nearly the last. scale: how large the target's states are."""
    draw = torch.Generator().manual_seed(settings.seed)
    weights = {}
    for name, shape in head_shapes(hidden, settings.width, settings.kept).items():
        if len(shape) == 2:
            small = 0.1 if name == "down" else 1.0
            weights[name] = torch.randn(shape, generator=draw) * (small / math.sqrt(shape[1]))
        elif name != "kept":
            weights[name] = torch.full(shape, scale if name == "out_norm" else 1.0)
    return {name: weight.requires_grad_() for name, weight in weights.items()}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def head_step(w: dict[str, Tensor], state: Tensor, embedding: Tensor, drop=lambda x: x) -> Tensor:
    """DraftHead.forward in operations that have gradients: the next state [R, hidden]. drop: of the MLP's values."""
    both = F.linear(norm(state, w["state_norm"]), w["from_state"])
    gate, up = (both + F.linear(norm(embedding, w["token_norm"]), w["from_token"])).chunk(2, dim=-1)
    return state + F.linear(drop(F.silu(gate) * up), w["down"])


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
        ids, self.where = self.tokens.unique(return_inverse=True)
        self.embeddings = target.embed.lookup(ids).float()  # [distinct tokens, hidden]
        self.teacher = [torch.cat(parts) for parts in zip(*map(self._teacher_of, self.states.split(1024)), strict=True)]

    def _teacher_of(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The chances of the TOP kept tokens [R, TOP], and which they are."""
        top = F.linear(states.float(), self.table).topk(min(TOP, len(self.kept)))
        return top.values.softmax(1), top.indices


def loss_of(w: dict[str, Tensor], ex: Examples, rows: Tensor, unroll: int, drop: Callable[[Tensor], Tensor]) -> Tensor:
    """Cross entropy of the teacher distribution and the head's, summed over the steps, per row of the first.

    Every step of the recurrence goes on with half of the rows before it, since later guesses are made less often.
    """
    total, first, state = torch.zeros(()), rows, ex.states[rows].float()
    for j in range(unroll):
        state = head_step(w, state, ex.embeddings[ex.where[rows + j]], drop)
        chances = F.log_softmax(F.linear(norm(state, w["out_norm"]), ex.table), dim=-1)  # [R, kept]
        teacher, where = (part[rows + j + 1] for part in ex.teacher)  # [R, TOP]
        total = total - (teacher * chances.gather(1, where)).sum()
        going_on = torch.nonzero(ex.left[rows] > j + 1).flatten()[: -(-len(rows) // 2)]
        rows, state = rows[going_on], state[going_on]
    return total / len(first)


def fit(ex: Examples, settings: Settings) -> dict[str, Tensor]:
    """The trained weights. Batch n is drawn from the seed and n."""
    scale = float(ex.states[:1024].float().square().mean().sqrt())
    w = first_weights(settings, ex.states.shape[1], scale)
    optimizer = torch.optim.AdamW(w.values(), lr=settings.rate, betas=(0.9, 0.98), weight_decay=0.01)
    warm = max(1, settings.steps // 20)
    for step in range(settings.steps):  # warm up over a twentieth of them, then a cosine down to nothing
        faded = 0.5 + 0.5 * math.cos(math.pi * step / settings.steps)
        optimizer.param_groups[0]["lr"] = settings.rate * min((step + 1) / warm, faded)
        draw = torch.Generator().manual_seed((settings.seed << 32) + step)
        rows = ex.starts[torch.randint(len(ex.starts), (settings.batch,), generator=draw)]

        def drop(x: Tensor, draw=draw) -> Tensor:
            return x * (torch.rand(x.shape, generator=draw) >= settings.dropout) / (1 - settings.dropout)

        loss = loss_of(w, ex, rows, settings.unroll, drop)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(w.values(), 1.0)
        optimizer.step()
        if (step + 1) % SAY_EVERY == 0 or step + 1 == settings.steps:
            warn(f"steps {step + 1:,} of {settings.steps:,}, loss {loss.item():.2f}")
    return {name: weight.detach() for name, weight in w.items()} | {"kept": ex.kept}


# -- the command


def train(out: str | Path, settings: Settings, load: Callable[[], LLM]) -> None:
    """Texts, training, file."""
    llm = load()
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    open(out, "ab").close()  # whoever may not write there shall not wait for it
    texts = write_texts(llm, settings.texts, settings.tokens, settings.seed)
    torch.set_num_threads(kernels.threads())  # an LLM leaves torch one, for the sake of its own kernels
    weights = fit(Examples(texts, settings.kept, llm.model), settings)
    save_head(out, weights, llm.model, settings.model, asdict(settings))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("speculative.py", description="Train a draft head, and measure it.")
    commands = parser.add_subparsers(dest="command", required=True)
    learn = commands.add_parser("train", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    learn.add_argument("--out", required=True, metavar="F", help="the file to write")
    for name, value in asdict(Settings()).items():
        learn.add_argument(f"--{name}", type=type(value), default=value)
    look = commands.add_parser("measure", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    look.add_argument("--speculate", default="head", help="the head to measure: head or head:<file>")
    look.add_argument("--model", default="smollm2")
    look.add_argument("--quant", default="int4")
    look.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    look.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    look.add_argument("--rounds", type=int, default=3)
    for command in (learn, look):
        command.add_argument("--threads", type=int, help="as many as there are processors")
    args = parser.parse_args(argv)
    if args.command == "measure":
        if args.speculate.partition(":")[0] != "head":
            look.error(f"--speculate {args.speculate}: head or head:<file>; n-grams are measured beside it anyway")
        if min(args.tokens, args.rounds, *args.batch) < 1:
            look.error("--tokens, --rounds and --batch must be at least 1")
        if max(args.batch) > (asked := min(map(len, HELD_OUT.values()))):
            look.error(f"--batch {max(args.batch)}: there are {asked} requests of a kind to answer side by side")
    return args


@as_command
def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.command == "measure":
        run_measure(args)
        return 0
    settings = Settings(**{name: getattr(args, name) for name in asdict(Settings())})
    train(args.out, settings, lambda: LLM(settings.model, quant=settings.quant, compile=True, threads=args.threads))
    print(f"{args.out}: {Path(args.out).stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
