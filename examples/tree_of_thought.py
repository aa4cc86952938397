"""Tree of thought: several plans branch off one question, each is judged on its own branch, the best is carried out.

    python -m examples.tree_of_thought

Source: Yao et al. 2023 (arXiv:2305.10601), reduced to one level of the tree.
"""

from generate import LLM
from program import Program, gen, select

QUESTION = "How can a small town get more people to ride bicycles?"
GRADES = {" poor": 1, " fair": 2, " good": 3}


def think(llm: LLM, question: str = QUESTION, width: int = 3) -> Program:
    """A program with values "idea" and "grade" (one for each branch), "best" and "answer"."""
    trunk = Program(llm, f"Question: {question}\n")
    branches = trunk.fork(width)
    for seed, branch in enumerate(branches):
        branch += "Idea:"
        branch += gen("idea", max_tokens=40, temperature=0.8, seed=seed, stop="\n")
        branch += "\nThis idea is"
        branch += select("grade", list(GRADES))
    trunk.join(branches)
    best = max(range(width), key=lambda i: GRADES[trunk["grade"][i]])
    trunk.values["best"] = trunk["idea"][best].strip()
    trunk += f"Idea:{trunk['idea'][best]}\nIn more detail:"
    trunk += gen("answer", max_tokens=60)
    return trunk


if __name__ == "__main__":
    program = think(LLM(quant="int4", compile=True))
    print(program)
    for idea, grade in zip(program["idea"], program["grade"], strict=True):
        print(f"{grade.strip():5} {idea.strip()}")
    print(f"{program.cached_tokens} of {program.prompt_tokens} prompt tokens came from the cache")
