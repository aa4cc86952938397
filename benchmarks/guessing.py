"""What guessing and jumping buy: several tokens from one step, where the text or a grammar allows it.

A decode step reads every weight for one row. More rows would cost little, but the next token has to be known first:
guessed by something cheap, or forced by a structure. So the same prompts are answered with and without (lab.py):

    speculation    off | n-grams | a trained head   steps for the same tokens; guesses made and accepted
    structured     free | mask | mask and jumps     steps, tokens drawn, valid answers

Guesses change no answer, so all sides must give the same tokens. Forced text may be written in other tokens than drawn
text, so there validity is compared. Sources: beside each claim in papers.json. Left out: trees of guesses.
"""

from __future__ import annotations

import json
import time
from unittest.mock import patch

from pydantic import BaseModel, Field

from benchmarks.lab import Lab, Result, Run, ratio, run_all, run_decode, tokens_of
from benchmarks.quality import TEXT
from drafting.budget import Speculator
from formats.command_line import warn
from sampling import SamplingParams

DRAFTS = (1, 2, 3, 4, 6, 8)  # guesses a step, for the picture
ANIMALS = ("fox", "whale", "mouse", "heron", "badger", "goat", "beetle", "wolf")
CODE = """def total_of_{0}(items):
    total = 0
    for item in items:
        if item.kind == "{0}":
            total += item.price * item.count
    return total

# The same function, with total renamed to result:
def result_of_{0}"""
PASSAGES = [line[:240] for line in TEXT.read_text(encoding="utf-8").splitlines() if line.strip()][:8]
AGAIN = "{0}\n\nThe same text once more, word for word:\n\n{0:.40}"
TEXTS = {  # prompts that hold the whole answer, most of it, nothing of it
    "quotes": ([AGAIN.format(text) for text in PASSAGES], {"temperature": 0.0}),
    "code": ([CODE.format(animal) for animal in ANIMALS], {"temperature": 0.0}),
    "story": ([f"Once upon a time there was a {animal} who" for animal in ANIMALS], {"temperature": 0.8}),
}


def speculation(lab: Lab) -> Result:
    """Texts x batch sizes x proposers. Its lines: n-grams that always guess so many tokens, whether it pays or not."""
    engines, sides, series = {"ngram": lab.open(speculate="ngram")}, {}, {text: [] for text in TEXTS}
    try:
        engines["head"] = lab.open(speculate="head")
    except ValueError as error:  # not every model has one
        warn(f"speculation without a head: {error}")
    known = {name: llm.engine.speculator for name, llm in engines.items()}

    def side(case: tuple[str, int, str], speculator: Speculator | None = None) -> Run:
        text, batch, name = case
        llm, (prompts, params) = lab.use(engines.get(name, engines["ngram"])), TEXTS[text]
        if speculator is None and name != "off":  # one that has learnt nothing yet
            old = known[name]
            speculator = Speculator(old.proposer, old.most, old.step, old.draft, old.trust)
        llm.engine.speculator, scheduler = speculator, lab.scheduler(llm=llm)
        params = params | {"max_tokens": lab.sizes.guessed, "ignore_eos": True}
        requests = [llm.add(prompt, SamplingParams(seed=i, **params)) for i, prompt in enumerate(prompts[:batch])]
        rate = run_decode(llm, requests)
        if llm.engine.speculator is not speculator:
            raise ValueError(f"{name} failed while it guessed; its error stands above")
        stats = speculator.stats() if speculator else {"drafted": 0, "accepted": 0, "tokens_per_step": 1.0}
        counted = {"steps": scheduler.work["steps"], "guesses": stats["drafted"], "accepted": stats["accepted"]}
        counted["tokens a step"] = round(stats["tokens_per_step"], 2)
        return Run(counted, {"tok/s": rate}, tokens_of(requests))

    for text in TEXTS:
        cases = [(text, n, name) for n in lab.sizes.batches[:2] for name in ("off", *engines)]
        sides |= lab.alternate(side, {f"{text} x{n}, {name}": (text, n, name) for text, n, name in cases})
        for most in DRAFTS:
            counted = side((text, 1, "ngram"), Speculator(known["ngram"].proposer, most)).counted
            series[text].append([most, round(share_right(counted), 4), counted["tokens a step"]])

    def gain(text: str, n: int, name: str) -> str:
        on, off = sides[f"{text} x{n}, {name}"], sides[f"{text} x{n}, off"]
        return f"{text} {ratio(on, off, 'tok/s').split(' ')[0]} ({share_right(on['counted']):.0%} right)"

    rows = [(name, n) for name in engines for n in lab.sizes.batches[:2]]
    gains = [f"{name} {n} at a time: {', '.join(gain(text, n, name) for text in TEXTS)}" for name, n in rows]
    even = [f"{name} {100 * speculator.break_even():.0f} %" for name, speculator in known.items()]
    most = max(side["counted"]["tokens a step"] for side in sides.values())
    return Result(
        f"{'; '.join(gains)}; one guess alone pays if right more often than {', '.join(even)}",
        f"guesses for nothing: up to {most:.2f} tokens a step",
        sides,
        series,
    )


def share_right(counted: dict) -> float:
    return counted["accepted"] / max(1, counted["guesses"])


class Person(BaseModel, extra="forbid"):
    full_name: str = Field(max_length=24)
    place_of_birth: str = Field(max_length=24)
    year_of_birth: int = Field(ge=1000, le=2100)


EXAMPLE = """Text: Marie Curie was born in Warsaw in 1867.
JSON: {"full_name": "Marie Curie", "place_of_birth": "Warsaw", "year_of_birth": 1867}

Text: %s
JSON: """
PEOPLE = (
    "Ada Lovelace was born in London in 1815.",
    "Wolfgang Amadeus Mozart was born in Salzburg in 1756.",
    "Emmy Noether was born in Erlangen in 1882.",
    "Leonhard Euler was born in Basel in 1707.",
    "Sofia Kovalevskaya was born in Moscow in 1850.",
    "Alan Turing was born in London in 1912.",
)


def is_person(text: str) -> bool:
    """Whether a text begins with JSON of a Person; what follows is forgiven."""
    try:
        Person.model_validate(json.JSONDecoder().raw_decode(text.lstrip())[0], strict=True)
    except ValueError:
        return False
    return True


def structured(lab: Lab) -> Result:
    """Records as JSON, one after another: freely, under a mask, and with what is forced appended at once."""
    llm, guides = lab.llm, lab.llm.engine.guides
    shape = {"json_schema": Person.model_json_schema(), "max_tokens": 160}

    def side(case: tuple[dict, bool]) -> Run:
        params, jumps = case
        scheduler, requests, began = lab.scheduler(), [], time.perf_counter()
        with patch.object(guides, "jump_forward", jumps):
            for text in PEOPLE[: lab.sizes.records]:
                requests.append(llm.add(EXAMPLE % text, SamplingParams(temperature=0, **params)))
                run_all(llm, requests)
        rate = len(requests) / (time.perf_counter() - began)
        texts, ids = [request.answers[0].text for request in requests], tokens_of(requests)
        steps, tokens = scheduler.work["steps"], sum(map(len, ids))
        # an answer that runs alone draws one token a step
        counted = {"steps": steps, "tokens": tokens, "drawn": steps, "forced": tokens - steps}
        return Run(counted | {"valid": sum(map(is_person, texts)) / len(texts)}, {"records/s": rate}, ids)

    for jumps in (False, True):  # masks are cached, so the first answers would pay for those of the later ones
        side((shape, jumps))
    cases = {"free": ({"max_tokens": 48}, True), "mask": (shape, False), "mask and jumps": (shape, True)}
    sides = lab.alternate(side, cases)
    free, a, b = (side["counted"] for side in sides.values())
    return Result(
        f"jumps {ratio(sides['mask and jumps'], sides['mask'], 'records/s')} the speed of a mask alone, {b['steps']} "
        f"steps instead of {a['steps']}; valid {free['valid']:.0%} free, {a['valid']:.0%} and {b['valid']:.0%} with "
        "the schema",
        f"only what is not forced is drawn: {a['drawn'] / b['drawn']:.2f}x fewer draws",
        sides,
    )


EXPERIMENTS = {"speculation": speculation, "structured": structured}
