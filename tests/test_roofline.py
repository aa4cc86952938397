"""The floor is measured with the threads that the kernels use, whatever torch was told to use meanwhile."""

import torch

import kernels
from benchmarks import roofline


def test_the_bandwidth_is_measured_with_the_threads_of_the_kernels(monkeypatch):
    seen, clock = [], roofline.time.perf_counter
    monkeypatch.setattr(roofline.time, "perf_counter", lambda: seen.append(torch.get_num_threads()) or clock())
    before = torch.get_num_threads(), kernels.threads()
    try:
        torch.set_num_threads(1)
        kernels.set_threads(2)
        assert roofline.read_bandwidth(mebibytes=1, repeats=2) > 0
        assert set(seen) == {2} and torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before[0])
        kernels.set_threads(before[1])


def test_the_arithmetic_ceiling_counts_two_operations_a_product(monkeypatch):
    monkeypatch.setattr(roofline, "best_time", lambda work, repeats: work() * 0 + 0.5)
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        assert roofline.matrix_rate(dtype, size=64) == 2 * 64**3 / 0.5
    assert roofline.prefill_floor(100e9, 7e9, 1000) == 140


def test_the_floor_is_bandwidth_over_the_bytes_of_a_token():
    assert roofline.decode_floor(30e9, 80e6, 20e6) == 300
