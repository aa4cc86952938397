"""GGUF: every block format against the PyPI package and by hand, and files damaged in every way we could think of."""

import random
import struct
import tracemalloc

import gguf as oracle_gguf
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizer import gguf_metadata

from formats import gguf, gguf_vocab
from formats.config import CheckpointError

QUANTISED = [name for name, kind in gguf.KINDS.items() if kind.dense is None]
# Where the fp16 scales of a block are, so that tests can put chosen numbers there.
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}


def oracle(kind: str, data: torch.Tensor) -> torch.Tensor:
    """[N, blocks, bytes] uint8 -> [N, K] float32, by the PyPI package."""
    package = oracle_gguf
    with np.errstate(all="ignore"):
        return torch.tensor(package.quants.dequantize(data.flatten(1).numpy(), package.GGMLQuantizationType[kind]))


def blocks_of(kind: str, data: torch.Tensor) -> gguf.Blocks:
    return gguf.Blocks(kind, (data.shape[0], data.shape[1] * gguf.KINDS[kind].weights), data)


def half_bytes(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float16).view(torch.uint8)


@pytest.mark.parametrize("kind", QUANTISED)
@given(seed=st.integers(0, 2**32), rows=st.integers(1, 5), width=st.integers(1, 3))
@settings(max_examples=25)
def test_random_blocks_equal_the_gguf_package(kind, seed, rows, width):
    draw = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, width, gguf.KINDS[kind].bytes), generator=draw, dtype=torch.uint8)
    torch.testing.assert_close(
        gguf.dequantize(blocks_of(kind, data)), oracle(kind, data), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("d", [0.0, -0.0, 1.0, -1.5, 65504.0, 6e-8, float("inf")])
@pytest.mark.parametrize("fill", [0, 255, None])
def test_edge_blocks_equal_the_gguf_package(kind, d, fill):
    draw = torch.Generator().manual_seed(7)
    shape = (2, 2, gguf.KINDS[kind].bytes)
    data = torch.randint(0, 256, shape, generator=draw, dtype=torch.uint8) if fill is None else torch.full(shape, fill)
    data = data.to(torch.uint8)
    for at in HALVES.get(kind, (0, 2)):
        data[:, :, at : at + 2] = half_bytes(d)
    torch.testing.assert_close(
        gguf.dequantize(blocks_of(kind, data)), oracle(kind, data), rtol=0, atol=0, equal_nan=True
    )


def hand_made(*parts) -> torch.Tensor:
    """One block from floats (fp16) and lists of bytes: [1, 1, bytes]."""
    pieces = [half_bytes(p) if isinstance(p, float) else torch.tensor(p, dtype=torch.uint8) for p in parts]
    return torch.cat(pieces)[None, None]


@pytest.mark.parametrize("d", [0.5, 0.0, -0.25])
def test_low_nibbles_are_the_first_half(d):
    low, high = list(range(16)), list(reversed(range(16)))  # w0..w15, w16..w31
    packed = [a | b << 4 for a, b in zip(low, high, strict=True)]
    q = torch.tensor(low + high).float()
    assert torch.equal(gguf.dequantize(blocks_of("Q4_0", hand_made(d, packed)))[0], d * (q - 8))
    assert torch.equal(gguf.dequantize(blocks_of("Q4_1", hand_made(d, 3.0, packed)))[0], d * q + 3)


@pytest.mark.parametrize("d", [0.5, 0.0, -0.25])
def test_q8_0_is_signed(d):
    q = list(range(-16, 16))
    block = hand_made(d, [v % 256 for v in q])
    assert torch.equal(gguf.dequantize(blocks_of("Q8_0", block))[0], d * torch.tensor(q).float())


@pytest.mark.parametrize("d, dmin", [(0.5, 0.25), (0.0, 1.0), (-0.5, -2.0)])
def test_q4_k_scales_and_minima(d, dmin):
    scales = [1, 2, 3, 63, 17, 33, 48, 60]  # six bits: the last four need the bits kept apart
    minima = [5, 0, 62, 7, 16, 35, 49, 63]
    packed = [s & 63 | scales[j + 4] >> 4 << 6 for j, s in enumerate(scales[:4])]
    packed += [m & 63 | minima[j + 4] >> 4 << 6 for j, m in enumerate(minima[:4])]
    packed += [s & 15 | (m & 15) << 4 for s, m in zip(scales[4:], minima[4:], strict=True)]
    q = [(3 * i + i // 32) % 16 for i in range(256)]
    qs = [q[64 * c + i] | q[64 * c + 32 + i] << 4 for c in range(4) for i in range(32)]
    want = [d * scales[i // 32] * q[i] - dmin * minima[i // 32] for i in range(256)]
    assert torch.equal(gguf.dequantize(blocks_of("Q4_K", hand_made(d, dmin, packed, qs)))[0], torch.tensor(want))


@pytest.mark.parametrize("d", [0.5, 0.0, -0.25])
def test_q6_k_offset_and_high_bits(d):
    scales = [(5 * i - 40) for i in range(16)]  # signed
    q = [(7 * i + i // 64) % 64 for i in range(256)]
    low, high = [], []
    for start in (0, 128):  # each half: 64 bytes of low nibbles, 32 bytes of four 2-bit fields
        low += [q[start + i] & 15 | (q[start + 64 + i] & 15) << 4 for i in range(64)]
        high += [sum((q[start + 32 * j + i] >> 4) << 2 * j for j in range(4)) for i in range(32)]
    block = hand_made(low, high, [s % 256 for s in scales], d)
    want = [d * scales[i // 16] * (q[i] - 32) for i in range(256)]
    assert torch.equal(gguf.dequantize(blocks_of("Q6_K", block))[0], torch.tensor(want))


def test_dequantize_in_slices_loses_no_block():
    draw = torch.Generator().manual_seed(1)
    data = torch.randint(0, 256, (3, (1 << 20) // 32 - 5, 18), generator=draw, dtype=torch.uint8)  # three slices
    whole = gguf.dequantize(blocks_of("Q4_0", data))
    for row in range(3):
        torch.testing.assert_close(
            gguf.dequantize(blocks_of("Q4_0", data[row : row + 1]))[0], whole[row], equal_nan=True
        )


def test_rows_of_blocks_are_rows_of_weights():
    draw = torch.Generator().manual_seed(3)
    blocks = blocks_of("Q4_1", torch.randint(0, 200, (6, 2, 20), generator=draw, dtype=torch.uint8))
    index = torch.tensor([5, 0, 3])
    assert torch.equal(gguf.dequantize(blocks.rows(index)), gguf.dequantize(blocks)[index])


# ---- the container ----


def text(value: str | bytes) -> bytes:
    value = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(value)) + value


def key(name: str, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def entry(name: str, dims, number: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, offset)


def container(keys=(), entries=(), data: bytes = b"", version=3, n_keys=None, n_tensors=None, align=32) -> bytes:
    head = struct.pack("<4sIQQ", b"GGUF", version, len(entries) if n_tensors is None else n_tensors, 0)
    head = head[:16] + struct.pack("<Q", len(keys) if n_keys is None else n_keys)
    head += b"".join(keys) + b"".join(entries)
    return head + bytes(-len(head) % align) + data


def opened(tmp_path, content: bytes) -> gguf.File:
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    return gguf.File(path)


GOOD = container([key("a", 4, struct.pack("<I", 5))], [entry("t", [4, 2])], struct.pack("<8f", *range(8)))


def test_metadata_of_every_type(tmp_path):
    keys = [
        key("u8", 0, b"\xff"),
        key("i8", 1, b"\xff"),
        key("bool", 7, b"\x01"),
        key("f64", 12, struct.pack("<d", 0.1)),
        key("text", 8, text("é")),
        key("broken", 8, text(b"\xe2\x96")),
        key("ints", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
        key("texts", 9, struct.pack("<IQ", 8, 2) + text("x") + text("")),
    ]
    want = {"u8": 255, "i8": -1, "bool": True, "f64": 0.1, "text": "é", "ints": [1, -2, 3], "texts": ["x", ""]}
    metadata = opened(tmp_path, container(keys)).metadata
    assert metadata.pop("broken").encode("utf-8", "surrogateescape") == b"\xe2\x96"
    assert metadata == want


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_are_views_in_torch_order(tmp_path, version):
    file = opened(tmp_path, container([], [entry("t", [4, 2])], struct.pack("<8f", *range(8)), version=version))
    assert torch.equal(file.tensor("t"), torch.arange(8.0).view(2, 4))
    assert file.blocks("t") is None
    assert file.tensor("t").untyped_storage().data_ptr() == file.raw("t").untyped_storage().data_ptr()


def test_alignment_is_the_files_own(tmp_path):
    for align, offset in ((64, 128), (1, 3)):
        keys = [key("general.alignment", 4, struct.pack("<I", align))]
        data = bytes(offset) + struct.pack("<2f", 7, 8)
        file = opened(tmp_path, container(keys, [entry("t", [2], offset=offset)], data, align=align))
        assert file.tensor("t").tolist() == [7, 8]


@pytest.mark.parametrize("quant", ["F16", "BF16", "Q4_0", "Q5_1", "Q8_0"])
def test_files_of_the_gguf_package_read_as_it_reads_them(tmp_path, quant):
    path = tiny.gguf_file(tiny.hf_folder(tmp_path / "hf", "llama"), tmp_path / "m.gguf", quant)
    package, ours = oracle_gguf, gguf.File(path)
    reader = package.GGUFReader(path)
    assert set(ours.tensors) == {t.name for t in reader.tensors}
    for t in reader.tensors:
        want = torch.tensor(package.quants.dequantize(t.data, t.tensor_type))
        assert torch.equal(ours.tensor(t.name).float(), want), t.name
    known = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert ours.metadata == known


def test_release_gives_back_memory_and_keeps_the_data(tmp_path):
    values = torch.arange(16384.0)
    file = opened(tmp_path, container([], [entry("t", [16384])], values.numpy().tobytes()))
    before = file.tensor("t")
    assert torch.equal(before, values)
    file.release("t")
    assert torch.equal(before, values) and torch.equal(file.tensor("t"), values)


HUGE = 1 << 62
DAMAGED = {
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 98362432\n", "git lfs pull"),
    "foreign": (b"\x89PNG\r\n" + bytes(100), "not a GGUF file"),
    "empty": (b"", "not a GGUF file"),
    "only magic": (b"GGUF\x03\x00", "the header needs 4 bytes"),
    "big-endian": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
    "version 1": (container(version=1), "version 1"),
    "tensor count": (container(n_tensors=HUGE), "truncated or damaged"),
    "key count": (container(n_keys=HUGE), "truncated or damaged"),
    "string length": (container([struct.pack("<Q", HUGE) + bytes(40)]), "truncated or damaged"),
    "array length": (container([key("a", 9, struct.pack("<IQ", 5, HUGE))]), "claims"),
    "array past the end": (container([key("a", 9, struct.pack("<IQ", 5, 1 << 20))]), "'a' needs 4194304 bytes"),
    "texts past the end": (container([key("a", 9, struct.pack("<IQ", 8, 1 << 20))]), "truncated or damaged"),
    "array of arrays": (container([key("a", 9, struct.pack("<IQ", 9, 1) + bytes(20))]), "value type 9"),
    "value type": (container([key("a", 77, bytes(20))]), "value type 77"),
    "key twice": (container([key("a", 7, b"\x01"), key("a", 7, b"\x01")]), "twice"),
    "no dims": (container([], [entry("t", [])], bytes(64)), "0 dimensions"),
    "dims": (container([], [entry("t", [1] * 5)], bytes(64)), "5 dimensions"),
    "zero dim": (container([], [entry("t", [0, 4])], bytes(64)), "cannot have"),
    "absurd dims": (container([], [entry("t", [HUGE, HUGE])], bytes(64)), "'t'"),
    "overflowing dims": (container([], [entry("t", [1 << 32, 1 << 32])], bytes(64)), "'t'"),
    "offset": (container([], [entry("t", [4], offset=1 << 40)], bytes(64)), "'t'"),
    "offset wraps": (container([], [entry("t", [4], offset=(1 << 64) - 32)], bytes(64)), "'t'"),
    "odd offset": (container([], [entry("t", [4], offset=8)], bytes(64)), "multiple of 32"),
    "part of a block": (container([], [entry("t", [48], 2)], bytes(64)), "blocks of 32"),
    "known, unread type": (container([], [entry("t", [256], 23)], bytes(256)), "IQ4_XS"),
    "unknown type": (container([], [entry("t", [4], 999)], bytes(64)), "unknown type 999"),
    "twice": (container([], [entry("t", [4]), entry("t", [4], offset=32)], bytes(64)), "twice"),
    "overlap": (container([], [entry("a", [16]), entry("b", [16], offset=32)], bytes(128)), "overlap"),
    "alignment": (container([key("general.alignment", 4, struct.pack("<I", 48))]), "general.alignment"),
    "alignment 0": (container([key("general.alignment", 4, bytes(4))]), "general.alignment"),
    "alignment text": (container([key("general.alignment", 8, text("x"))]), "general.alignment"),
    "data cut": (GOOD[:-1], "tensor 't'"),
    "table cut": (GOOD[: len(GOOD) - 80], "truncated or damaged"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused_by_name(tmp_path, case):
    content, words = DAMAGED[case]
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="file.gguf") as caught:
            opened(tmp_path, content)
        assert words in str(caught.value)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20, "a damaged length led to a huge allocation"
    finally:
        tracemalloc.stop()


def test_any_cut_of_a_real_file_is_refused(tmp_path):
    whole = tiny.gguf_file(tiny.hf_folder(tmp_path / "hf", "qwen2"), tmp_path / "m.gguf", "Q8_0").read_bytes()
    assert opened(tmp_path, whole).tensors
    size, rng = len(whole), random.Random(0)
    for cut in [size - 1024, size - 40, 23, 4] + [rng.randrange(size - 32) for _ in range(40)]:
        with pytest.raises(CheckpointError):
            opened(tmp_path, whole[:cut])


def test_changed_bytes_are_refused_or_harmless(tmp_path):
    """Whatever a header says, reading every tensor it lists stays within the file: a crash here ends the test run."""
    rng = random.Random(0)
    keys = [key("general.alignment", 4, struct.pack("<I", 32)), key("n", 9, struct.pack("<IQ2i", 5, 2, 1, 2))]
    good = container(keys, [entry("a", [64, 2], 2), entry("b", [4], 0, 96)], bytes(range(112)))
    assert set(opened(tmp_path, good).tensors) == {"a", "b"}
    refused = 0
    for _ in range(1500):
        bad = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            bad[rng.randrange(len(good) - 112)] = rng.choice((0, 1, 2, 8, 127, 128, 255, rng.randrange(256)))
        try:
            file = opened(tmp_path, bytes(bad))
        except CheckpointError:
            refused += 1
            continue
        for name, info in file.tensors.items():
            assert file.tensor(name).shape == info.shape
    assert refused > 500


def test_a_missing_label_of_the_pre_tokenizer_is_warned_of(capsys):
    metadata = gguf_metadata("gpt2") | {"tokenizer.ggml.pre": "gpt-2"}
    ids = gguf_vocab.build(metadata)[0].encode("the x").ids
    assert capsys.readouterr().err == ""
    del metadata["tokenizer.ggml.pre"]
    assert gguf_vocab.build(metadata)[0].encode("the x").ids == ids
    assert "no tokenizer.ggml.pre" in capsys.readouterr().err
