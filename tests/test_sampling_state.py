"""What a sequence carries from token to token: penalties that count, bans that hold, and their undoing."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sampling_rows import normal, state, tokens

from sampling import NonFiniteLogits, NoTokenLeft, process_logits, sample

INF = math.inf


def test_F19_repetition_multiplies_negative_and_divides_positive_over_prompt_and_output():
    row = torch.tensor([[-1.0, 1.0, 4.0, -2.0, 0.5]])
    got = process_logits(row, [state([0, 2], [1], repetition_penalty=2)])
    assert got.tolist() == [[-2.0, 0.5, 2.0, -2.0, 0.5]]


def test_F19_presence_and_frequency_count_the_output_only():
    row = torch.zeros(1, 5)
    assert process_logits(row, [state([0, 0], [1, 2, 2], presence_penalty=0.5)]).tolist() == [[0, -0.5, -0.5, 0, 0]]
    assert process_logits(row, [state([0, 0], [1, 2, 2], frequency_penalty=0.5)]).tolist() == [[0, -0.5, -1.0, 0, 0]]
    both = [state([0, 1], [1, 1], frequency_penalty=-0.25, presence_penalty=1.0, repetition_penalty=2)]
    assert process_logits(row + 4, both).tolist() == [[2.0, 1.5, 4.0, 4.0, 4.0]]


def test_bias_comes_before_penalties_and_bans_come_last():
    row = torch.tensor([[1.0, 1.0, 1.0, 1.0]])
    got = process_logits(row, [state([0], logit_bias={0: 3, 1: 3}, repetition_penalty=2)])
    assert got.tolist() == [[2.0, 4.0, 1.0, 1.0]]
    banned = [state(logit_bias={1: 100, 2: 100}, min_tokens=1, stop_token_ids=[2])]
    assert process_logits(row, banned, [torch.tensor([True, False, True, True])]).tolist() == [[1.0, -INF, -INF, 1.0]]


@given(
    st.lists(st.integers(0, 9), max_size=20),
    st.lists(st.one_of(st.integers(0, 9), st.integers(0, 90), st.integers(-20, -1)), max_size=120),
    st.sampled_from([1.0, 1.3]),
)
def test_counts_survive_any_commits_truncations_and_forks(prompt, script, repetition):
    """Script: commit a token, or (negative) undo so many. Penalised rows equal those of a state built afresh."""
    row = normal(1, 91, seed=1)
    fields = {"repetition_penalty": repetition, "presence_penalty": 0.4, "frequency_penalty": 0.3}
    walked, output = state(prompt, **fields), []
    for step in script:
        if step >= 0:
            walked.commit(step)
            output.append(step)
        else:
            walked.fork(1).commit(50)  # a fork's tokens are its own
            output = output[: max(0, len(output) + step)]
            walked.truncate(len(output))
        expected = row[0].clone()
        for token in set(prompt) | set(output) if repetition != 1 else ():
            expected[token] = expected[token] * repetition if expected[token] < 0 else expected[token] / repetition
        for token, count in Counter(output).items():
            expected[token] -= 0.3 * count + 0.4
        torch.testing.assert_close(process_logits(row, [walked])[0], expected, rtol=0, atol=1e-5)
        assert torch.equal(process_logits(row, [walked]), process_logits(row, [state(prompt, output, **fields)]))
    assert walked.output == output


@pytest.mark.parametrize("n_output", [-1, 3])
def test_truncating_beyond_the_output_is_refused(n_output):
    with pytest.raises(ValueError, match=f"output of 2 tokens to {n_output}"):
        state([], [1, 2]).truncate(n_output)


def test_F33_what_was_output_stays_output():
    """After a preemption the prompt is recomputed with the output behind it: the state is the same, so is the draw."""
    fields = {"frequency_penalty": 0.5, "seed": 4, "logprobs": 2, "temperature": 0.9}
    row, lived = normal(1, 60), state([9, 9], [5, 5, 7], **fields)
    rolled = state([9, 9], [5, 5, 7, 8, 8, 9], **fields)
    rolled.truncate(3)
    assert sample(row, [lived]) == sample(row, [rolled])


# Bans


def test_F15_min_tokens_bans_every_eos_and_stop_id_until_then():
    row = normal(1, 30)
    walker = state(eos=[3, 4], temperature=0, logit_bias={3: 90, 4: 80, 5: 70}, min_tokens=4, stop_token_ids=[5])
    out = []
    for _ in range(5):
        out.append(sample(row, [walker])[0].token)
        walker.commit(out[-1])
    assert not {3, 4, 5} & set(out[:4]) and out[4] == 3


def test_F16_ignored_eos_ids_are_tokens_like_any_other():
    fields = {"temperature": 0, "logit_bias": {7: 100}, "min_tokens": 4}
    row = normal(1, 30)
    assert tokens(sample(row, [state(eos=[5, 7, 9], **fields)])) != [7]
    assert tokens(sample(row, [state(eos=[5, 7, 9], ignore_eos=True, **fields)])) == [7]
    assert tokens(sample(row, [state(ignore_eos=True, stop_token_ids=[7], **fields)])) != [7]


def test_F59_eos_wins_over_min_tokens_when_the_mask_leaves_nothing_else():
    row, complete = normal(1, 30), torch.zeros(30, dtype=torch.bool)
    complete[[3, 4]] = True
    for fields in ({"temperature": 0}, {}):
        assert tokens(sample(row, [state(eos=[3, 4], min_tokens=64, max_tokens=99, **fields)], [complete]))[0] in (3, 4)
    complete[20] = True  # now the text can go on, so it must
    assert tokens(sample(row, [state(eos=[3, 4], min_tokens=64, max_tokens=99)], [complete])) == [20]
    for end in ([], [5]):  # a stop token that is part of the text ends nothing: what is asked for cannot be
        (result,) = sample(row, [state(eos=end, stop_token_ids=[3, 4, 20], min_tokens=64, max_tokens=99)], [complete])
        assert isinstance(result, NoTokenLeft)


@pytest.mark.parametrize(
    "fields", [{"temperature": 0}, {}, {"top_k": 5}, {"top_p": 0.9, "logit_bias": {1: 100, 2: 100}}]
)
def test_a_mask_is_never_overstepped_and_ids_beyond_it_are_forbidden(fields):
    rows = normal(1, 64)
    rows[0, 60] = 50.0  # a padded id
    mask = torch.zeros(60, dtype=torch.bool)
    mask[[1, 17, 33]] = True
    drawn = {sample(rows, [state(seed=seed, **fields)], [mask])[0].token for seed in range(50)}
    assert drawn <= {1, 17, 33}


def test_masks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="up to 8 tokens"):
        sample(normal(1, 8), [state()], [torch.ones(9, dtype=torch.bool)])
    with pytest.raises(ValueError, match="bool"):
        sample(normal(1, 8), [state()], [torch.ones(8)])
    with pytest.raises(ValueError, match="2 rows of logits, 1 states"):
        sample(normal(2, 8), [state()])


def test_a_row_with_nothing_allowed_fails_alone():
    rows = normal(3, 8)
    got = sample(rows, [state(temperature=0)] * 3, [None, torch.zeros(8, dtype=torch.bool), None])
    assert isinstance(got[1], NoTokenLeft) and not isinstance(got[1], NonFiniteLogits)
    assert tokens([got[0], got[2]]) == [int(rows[0].argmax()), int(rows[2].argmax())]


def test_F04_padded_ids_can_be_pushed():
    fields = {"logit_bias": {"63": 100}, "logprobs": 1}
    assert sample(normal(1, 64), [state(**fields)])[0].token == 63


def test_an_eos_id_beyond_the_models_vocabulary_harms_nothing():
    row = normal(1, 30)
    assert tokens(sample(row, [state(eos=[2, 30, 10**9], temperature=0, min_tokens=2)])) == [int(row.argmax())]
