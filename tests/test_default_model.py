"""The default model itself: whoever else is in the batch, each answer is the one its prompt gets alone."""

import pytest

from generate import LLM
from sampling import SamplingParams

TEXT = (
    "The bakery on the corner opened at six, and by half past the queue reached the bridge. Nobody minded, since the "
    "smell of bread made waiting easy and the owner's dog knew everybody by name. On some mornings it rained. "
)
LENGTHS = [3 + 3 * i for i in range(32)]  # 3 to 96 tokens


@pytest.mark.parametrize("engine", ({}, {"quant": "int4", "compile": True}), ids=("float32", "int4, compiled"))
def test_each_of_32_mixed_prompts_gets_the_answer_it_gets_alone(smollm2, engine):
    llm = LLM(num_blocks=600, max_num_batched_tokens=256, threads=2, **engine)
    ids = llm.tokenizer.encode(TEXT * 8)
    prompts = [ids[5 * i : 5 * i + n] for i, n in enumerate(LENGTHS)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    together = llm.generate(prompts, params)
    assert llm.stats()["steps"] < 60, "they were not batched"
    for prompt, output in zip(prompts, together, strict=True):
        llm.scheduler.drop_cache()
        (alone,) = llm.generate([prompt], params)
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids, len(prompt)
    assert llm.stats()["live"] == 0
