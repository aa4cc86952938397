from sampling import ParameterError, SamplingParams  # noqa: F401
