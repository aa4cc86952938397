"""SamplingParams: every illegal value is refused by name, every legal one stored in one normal form."""

import dataclasses
import math

import pytest

from sampling import ParameterError, SamplingParams

NAN, INF = math.nan, math.inf
# What no number field takes; each field adds its own range below.
NO_NUMBER = ["1", b"1", [1], {}, True, False, 1 + 0j, NAN, INF, -INF]
REALS = {  # field: (legal, illegal)
    "temperature": ([0, 1, 0.7, 1e-9, 2.5, 1e6], [None, -0.1, -1, 1e7, 10**400]),
    "top_p": ([1, 1.0, 0.5, 1e-300], [None, 0, -0.1, 1.0001, 2]),
    "min_p": ([0, 0.05, 1], [None, -0.01, 1.01]),
    "presence_penalty": ([-2, 0, 0.5, 2], [None, -2.1, 2.1, 10**400]),
    "frequency_penalty": ([-2, 0, 0.5, 2], [None, -2.1, 2.1]),
    "repetition_penalty": ([1, 0.5, 1.3, 100], [None, 0, -1, 1e-300, 1e300]),
}
INTEGERS = {
    "n": ([1, 3, 128], [None, 0, -1, 129, 100_000, 1.0, 1.5]),
    "best_of": ([None, 1, 128], [0, -1, 129, 2.0]),
    "beam_width": ([None, 1, 64], [0, -1, 65, 2.0]),
    "top_k": ([-1, 0, 1, 10**6], [None, -2, 1.5, 40.0]),
    "max_tokens": ([None, 0, 1, 10**6], [-1, -5, 1.5, 256.0]),
    "min_tokens": ([0, 1, 16], [None, -1, 0.5]),
    "seed": ([None, 0, 1, -1, 2**63 - 1, -(2**63)], [2**63, -(2**63) - 1, 1.0, 10**5000]),
    "logprobs": ([None, 0, 20], [-1, 21, 100_000, 1.0]),
    "prompt_logprobs": ([None, 0, 20], [-1, 21, 100_000, 1.0]),
}
OTHERS = {
    "ignore_eos": ([True, False], [None, 0, 1, "yes"]),
    "include_stop_str_in_output": ([True, False], [None, 0, 1, "no"]),
    "stop": (
        [None, "x", [], ["a", "b"], ("a",)],
        ["", [""], ["a", ""], 0, False, {}, b"x", [b"x"], [None], [1], ["a", 1]],
    ),
    "stop_token_ids": ([None, [], [0, 5], (7,)], ["5", 5, [-1], [True], ["5"], [1.0], [None], {}, {5: 1}, 0]),
    "logit_bias": (
        [None, {}, {5: 1}, {"5": -100, 6: 100.0}, {"007": 0}],
        [[], "x", 0, {"AI": -100}, {"-1": 1}, {-1: 1}, {"": 1}, {"1.0": 1}, {1.0: 1}, {True: 1}, {None: 1}, {"+5": 1}]
        + [{" 5": 1}, {"1_0": 1}, {"٣": 1}, {"9" * 5000: 1}, {5: 1, "5": 2}, {5: 101}, {5: -100.5}]
        + [{5: value} for value in ["1", None, True, [1], NAN, INF, -INF, 10**400]],
    ),
    "regex": ([None, "a+"], ["", 1, True, b"a", ["a"]]),
    "grammar": ([None, 'start: "a"'], ["", 1, True, b"a", ["a"]]),
    "json_schema": ([None, {}, {"type": "object"}, '{"type": "string"}'], ["", "{", "[]", "true", 1, True, [], b"{}"]),
    "choice": ([None, ["yes", "no"], ("a",)], [[], (), "yes", [""], ["a", ""], [1], [None], {}, 0, False, {"a": 1}]),
}
FIELDS = {
    **{field: (legal, [*NO_NUMBER, *illegal]) for field, (legal, illegal) in (REALS | INTEGERS).items()},
    **OTHERS,
}


def cases(which: int) -> list:
    return [pytest.param(f, v, id=f"{f}-{i}") for f, pair in FIELDS.items() for i, v in enumerate(pair[which])]


def test_the_table_knows_every_field():
    assert set(FIELDS) == {field.name for field in dataclasses.fields(SamplingParams)}


@pytest.mark.parametrize(("field", "value"), cases(0))
def test_legal_values_are_taken(field, value):
    extra = {"max_tokens": None} if field == "min_tokens" else {"best_of": 128} if field == "n" else {}
    params = SamplingParams(**{field: value, **extra})
    again = dataclasses.replace(params)
    assert again == params  # the normal form is itself legal


@pytest.mark.parametrize(("field", "value"), cases(1))
def test_illegal_values_are_refused_by_name(field, value):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert caught.value.field == field
    assert message.startswith(field + "=") and "must be" in message
    assert len(message) < 1000  # F64: an error does not echo its input at length


def test_errors_show_the_value_and_what_is_allowed():
    with pytest.raises(ValueError, match=r"top_p=1\.5 is not allowed: it must be a number in \(0, 1\]"):
        SamplingParams(top_p=1.5)
    with pytest.raises(ValueError, match=r"temperature=nan"):
        SamplingParams(temperature=math.nan)


def test_normal_forms():
    params = SamplingParams(temperature=1, stop="END", stop_token_ids=[3], logit_bias={"5": 1, 6: 2}, choice=["a", "b"])
    assert type(params.temperature) is float
    assert params.stop == ("END",) and params.stop_token_ids == (3,) and params.choice == ("a", "b")
    assert params.logit_bias == {5: 1.0, 6: 2.0}
    assert SamplingParams(json_schema='{"type": "null"}').json_schema == {"type": "null"}


def test_numpy_numbers_are_numbers():
    numpy = pytest.importorskip("numpy")
    params = SamplingParams(n=numpy.int64(2), temperature=numpy.float32(0.5))
    assert type(params.n) is int and type(params.temperature) is float
    with pytest.raises(ValueError, match="n="):
        SamplingParams(n=numpy.bool_(True))


def test_later_edits_of_the_arguments_change_nothing():
    stop, bias, schema = ["a"], {1: 1.0}, {"properties": {}}
    params = SamplingParams(stop=stop, logit_bias=bias, json_schema=schema)
    stop.append("b"), bias.update({2: 1.0}), schema["properties"].update(x={})
    assert params.stop == ("a",) and params.logit_bias == {1: 1.0} and params.json_schema == {"properties": {}}
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2


def test_a_schema_nested_beyond_reason_is_refused():
    schema: dict = {}
    for _ in range(20_000):
        schema = {"items": schema}
    with pytest.raises(ParameterError, match="nested too deeply"):
        SamplingParams(json_schema=schema)
    with pytest.raises(ParameterError, match="json_schema"):
        SamplingParams(json_schema='{"items": ' * 200_000 + "{}" + "}" * 200_000)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("min_tokens", {"min_tokens": 5, "max_tokens": 4}),
        ("min_tokens", {"min_tokens": 1, "max_tokens": 0}),
        ("best_of", {"n": 3, "best_of": 2}),
        ("n", {"n": 3, "beam_width": 2}),
        ("best_of", {"best_of": 4, "beam_width": 4}),
        ("temperature", {"temperature": 0.7, "beam_width": 4}),
        ("top_p", {"top_p": 0.9, "beam_width": 4}),
        ("top_k", {"top_k": 5, "beam_width": 4}),
        ("min_p", {"min_p": 0.1, "beam_width": 4}),
        ("json_schema", {"regex": "a", "json_schema": {}}),
        ("choice", {"regex": "a", "choice": ["a"]}),
        ("choice", {"json_schema": {}, "choice": ["a"]}),
    ],
)
def test_fields_that_contradict_each_other_are_refused(field, arguments):
    with pytest.raises(ParameterError) as caught:
        SamplingParams(**arguments)
    assert caught.value.field == field


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="tempreature"):
        SamplingParams(tempreature=1)


@pytest.mark.parametrize("stop", ["", [""], ["END", ""]])
def test_F14_an_empty_stop_string_is_refused(stop):
    with pytest.raises(ValueError, match="stop="):
        SamplingParams(stop=stop)


@pytest.mark.parametrize("stop", [None, [], ()])
def test_F14_no_stop_strings_mean_no_stop(stop):
    assert SamplingParams(stop=stop).stop == ()


@pytest.mark.parametrize("bias", [{"AI": -100}, {"-1": 1}])
def test_F32_a_key_that_is_no_token_id_is_refused_at_construction(bias):
    with pytest.raises(ValueError, match="logit_bias"):
        SamplingParams(logit_bias=bias)


def test_F32_ids_beyond_the_vocabulary_are_refused_before_scheduling():
    SamplingParams(logit_bias={}, stop_token_ids=[]).check_vocab(100)
    SamplingParams(logit_bias={"99": 5}, stop_token_ids=[99]).check_vocab(100)
    with pytest.raises(ParameterError, match=r"logit_bias=999999.*below the vocabulary size 100"):
        SamplingParams(logit_bias={"999999": 5}).check_vocab(100)
    with pytest.raises(ParameterError, match=r"stop_token_ids=100.*below the vocabulary size 100"):
        SamplingParams(stop_token_ids=[5, 100]).check_vocab(100)
