"""What a draft head learns from: texts that the target writes itself, and the hidden states it had while writing.

Problem. A head must say what this model would say next, not what people would. Any text would do as a beginning, but
its continuation has to be the model's own, and beside every token the head wants the state it was drawn from.

Idea. Let the engine answer a few hundred requests that a script composes, subjects times instructions, and look over
its shoulder: a proposer that guesses nothing, but keeps the states it is shown (`Recorder`).

    request    "Give three facts about bees."             greedy, or at temperature 0.7: both are asked of a model
    tokens        Bees  are   social  ins  ects  ...
    states     s0    s1    s2      s3    s4              row i: token i was drawn from state i

Texts are written shard by shard, each from nothing but the seed and its number, so an interrupted run goes on where it
stopped and ends with the same files. The requests for measuring (`held_out`) have subjects and instructions that no
training request has.

Source: self-distillation data as in Medusa, Cai et al. 2024 (arXiv:2401.10774, section 2.3.2). Left out: real
conversations, which would have to be fetched.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from drafting.budget import Speculator
from generate import LLM
from request import Answer
from sampling import SamplingParams

SHARD = 64  # texts
TEMPERATURES = (0.0, 0.7)

SUBJECTS = (
    "the moon|bees|volcanoes|bread|chess|the ocean|bicycles|trees|rivers|money|sleep|the heart|winter|dogs|cats|horses|"
    "coffee|tea|gardens|football|painting|the piano|trains|bridges|castles|dinosaurs|robots|computers|the internet|"
    "electricity|magnets|light|sound|clouds|storms|deserts|mountains|islands|forests|birds|fish|whales|spiders|apples|"
    "potatoes|cheese|chocolate|rice|salt|sugar|water|fire|glass|paper|books|libraries|schools|teachers|doctors|farmers|"
    "sailors|cities|villages|markets|taxes|laws|elections|kings|the Roman Empire|ancient Egypt|the Renaissance|maps|"
    "clocks|calendars|numbers|prime numbers|triangles|probability|gravity|atoms|cells|genes|vaccines|germs|exercise|"
    "healthy food|friendship|courage|kindness|anger|memory|dreams|language|poetry|music|dance|theatre|photography|"
    "cooking|travel|holidays|birthdays|job interviews|public speaking|time management|saving energy|recycling|"
    "climate change|solar power|wind power|electric cars|space travel|stars|Mars|black holes|submarines|airplanes"
).split("|")
ASKED = {
    "chat": (
        "What is the most important thing to know about {}?|Why do people care about {}?|Explain {} to a child.|"
        "Give me three facts about {}.|What are the advantages and disadvantages of {}?|How have {} changed over time?|"
        "Give me five tips about {}.|What should a beginner learn about {}?|How are {} and {} related?|"
        "Write a short article about {}.|What questions about {} are still open?|Tell me about {}.|"
        "Write a lesson plan about {}.|List ten words that have to do with {} and explain each.|"
        "I know nothing about {}. Where do I begin?|What would the world be without {}?"
    ).split("|"),
    "story": (
        "Write a short story about {}.|Tell a story in which a girl learns something about {}.|"
        "Write a poem about {}.|Write a dialogue between two friends about {}.|Describe a day that had to do with {}.|"
        "Write a letter to my grandmother about {}.|Write the beginning of a novel about {} and {}."
    ).split("|"),
    "summary": (
        "Summarize this text: {text}|Put this text in simpler words: {text}|"
        "What is the main point of this text? {text}|Write a headline and a summary for this text: {text}|"
        "Correct the mistakes in this text and write it out again: {text}"
    ).split("|"),
    "code": (
        "Write a Python function to {task}.|Write a Python program to {task}, and explain it.|"
        "How do I {task} in Python?|Write a JavaScript function to {task}."
    ).split("|"),
}
PASSAGES = (
    "Many people think that {} matter little, but a study of {} says otherwise. Researchers asked two hundred "
    "families over three years. Those who knew most about {} were also the ones who worried least.|"
    "The town council met on Monday to talk about {}. Some members wanted to spend more on {}, others asked for a "
    "vote. In the end the mayor promised a report by spring, and the meeting closed late in the evening.|"
    "When Anna was young, nobody in her family spoke about {}. That changed when her uncle came home from abroad with "
    "a box of notes on {}. She read them all, and years later she wrote a book."
).split("|")
TASKS = (
    "reverse a string|find the largest number in a list|check whether a number is prime|sort a list of names|"
    "count the words in a file|compute the factorial of a number|remove duplicates from a list|read a CSV file|"
    "print the Fibonacci numbers|convert Celsius to Fahrenheit|compute the average of a list|merge two dictionaries|"
    "check whether a word is a palindrome|find the common elements of two lists|generate a random password|"
    "download a web page|parse a date|draw a line chart|implement a stack|implement binary search|"
    "count the vowels in a sentence|flatten a nested list|compute the greatest common divisor|"
    "validate an email address|simulate rolling two dice|"
    "write a class for a bank account|connect to a database|handle exceptions"
).split("|")


def requests(n: int, seed: int) -> list[str]:
    """n requests, the same for the same seed, of all kinds."""
    draw = random.Random(seed)

    def compose(form: str) -> str:
        form = form.replace("{text}", draw.choice(PASSAGES)).replace("{task}", draw.choice(TASKS))
        while "{}" in form:
            form = form.replace("{}", draw.choice(SUBJECTS), 1)
        return form

    kinds = ("chat", "chat", "chat", "story", "story", "summary", "code")
    return [compose(draw.choice(ASKED[kinds[i % len(kinds)]])) for i in range(n)]


def held_out() -> dict[str, list[str]]:
    """Requests by kind that no training text begins with, and whose subjects and tasks none of them has."""
    return {
        "chat": [
            "Can you help me understand how lighthouses guide ships?",
            "My neighbour keeps goats. What do they eat, and how much care do they need?",
            "Which is better for a small flat, a carpet or a wooden floor?",
            "Why does my knee hurt when I climb stairs, and when should I see somebody?",
            "Could you compare oil lamps with candles for a hut without a power line?",
            "My tent leaks at the seams. What can I do before the weekend?",
            "Who invented the zip, and what did people use before?",
            "Is it safe to swim after a meal, or should I wait?",
        ],
        "story": [
            "Once upon a time there was a fox who could not find its way home. Continue.",
            "Invent a legend that explains why owls are awake at night.",
            "A detective finds an umbrella in an empty room. Write the first page.",
            "Make up a bedtime tale with a dragon that is afraid of candles.",
            "Continue: The last ferry had left, and the old man was still on the pier.",
            "Retell the tale of the tortoise and the hare, but let the hare speak.",
            "Two strangers share a bench in the rain. Write what they say.",
            "Imagine a postman who delivers letters from the future, and let him tell of one day.",
        ],
        "summary": [
            "Sum up in two sentences: The ferry between the two harbours was stopped on Friday because of ice. About "
            "ninety passengers spent the night in a gymnasium, where volunteers served soup. The company said that it "
            "would return the fares, and that service would begin again once the channel was clear.",
            "Shorten this: Our violin workshop was founded by two brothers who had learned their trade in Cremona. "
            "They built eleven instruments in the first year and sold only four. Today the workshop employs thirty "
            "people, and orders are taken for the year after next.",
            "What happened here, briefly? The goalkeeper slipped in the last minute, the ball rolled over the line, "
            "and the referee, who stood behind a photographer, saw nothing. The match was repeated.",
            "Give the gist of the following. Mushrooms grow from threads that spread through the soil for years. "
            "What we pick is only the fruit. Cut it with a knife and leave the threads, and more will grow there.",
            "Say this more briefly: The museum has bought a wooden sledge that an expedition left behind ninety years "
            "ago. A hunter found it under the snow, and his family kept it in a barn. It will be shown from May on.",
            "Repeat only the facts of this: To everybody's surprise the small bakery won the prize. Its owner, who had "
            "been a nurse until two years before, bakes forty loaves a day and closes at noon.",
            "Give a title and one sentence for this: Our bus line will no longer stop at the mill. The new stop is at "
            "the corner of the cemetery, two hundred steps away, and has a roof. The night bus stops at both.",
            "Tell me in one line what this says: The hedgehog that visits us at dusk has a notch in its left ear. We "
            "have seen it since April. It eats snails, drinks from the bowl and leaves before the fox comes.",
        ],
        "code": [
            "Write Python code that transposes a matrix.",
            "Show me how to find the shortest path in a graph with Python.",
            "Write a function that turns Roman numerals into integers.",
            "I need a Python script that renames all photos in a folder by date.",
            "Please write a class in Python for a queue with two ends.",
            "Using only the standard library, time how long a Python call takes.",
            "Give me Python code that prints a multiplication table.",
            "Can you write a regular expression in Python that finds all dates in a text?",
        ],
    }


class Recorder:
    """A proposer that guesses nothing and keeps, for every answer, the states its tokens were drawn from."""

    def __init__(self, llm: LLM):
        self.llm = llm
        self.states: dict[Answer, list[torch.Tensor]] = {}

    def strength(self, answers: list[Answer]) -> list[int]:
        rows = self.llm.engine.rows
        for answer in answers:
            if answer in rows:
                self.states.setdefault(answer, []).append(self.llm.engine.runner.states[rows[answer]].half().cpu())
        return [0] * len(answers)

    def propose(self, answers: list[Answer], limits: list[int]) -> list[list[int]]:
        raise AssertionError("an answer without evidence is given no guesses")


def write_shard(llm: LLM, path: Path, asked: list[str], tokens: int, seed: int) -> None:
    """Answer the requests, and save tokens int32 [T], their states float16 [T, hidden], and lengths of the texts."""
    recorder = Recorder(llm)
    llm.engine.speculator = Speculator(recorder)
    answers = []
    for i, text in enumerate(asked):
        params = SamplingParams(temperature=TEMPERATURES[i % 2], max_tokens=tokens, seed=seed + i)
        ids = llm.tokenizer.encode_chat([{"role": "user", "content": text}])
        answers.append(llm.add(ids, params).answers[0])
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.speculator = None
    failed = next((answer.error for answer in answers if answer.error), None)
    if failed:
        raise ValueError(f"the model could not answer a request of the training text: {failed}")
    answers = [answer for answer in answers if answer in recorder.states]  # others ended at their first token
    states = [torch.stack(recorder.states[answer]) for answer in answers]  # the last token's has been overwritten
    drawn = [token for c, s in zip(answers, states, strict=True) for token in c.token_ids[: len(s)]]
    shard = {
        "tokens": torch.tensor(drawn, dtype=torch.int32),
        "states": torch.cat(states) if states else torch.empty(0, llm.config.hidden_size, dtype=torch.float16),
        "lengths": torch.tensor([len(s) for s in states], dtype=torch.int32),
    }
    partial = path.with_suffix(".partial")
    save_file(shard, str(partial))
    os.replace(partial, path)


def write_texts(
    llm: LLM, folder: Path, texts: int, tokens: int, seed: int, progress: Callable[[int, int], None]
) -> dict[str, torch.Tensor]:
    """All shards of the training texts, those that are there already left alone; then as one, in order."""
    asked = requests(texts, seed)
    paths = [folder / f"texts-{start // SHARD:04}.safetensors" for start in range(0, texts, SHARD)]
    for i, path in enumerate(paths):
        if not path.exists():
            part = asked[i * SHARD : (i + 1) * SHARD]
            write_shard(llm, path, part, tokens, (seed << 32) + i * SHARD)
            progress(min(texts, (i + 1) * SHARD), texts)
    shards = [load_file(str(path)) for path in paths]
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}
