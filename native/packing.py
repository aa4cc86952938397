"""Quantised weights in the one packed form that every backend of kernels.py reads.

The problem. A product over 4-bit weights must open up two codes a byte and meet them with the right activations, at the
speed of memory. The canonical storage (what files hold, see quantize.py) is row after row, so neighbouring bytes belong
to one output and the machine's lanes to none.

The idea. Sixteen output channels by 32 inputs are one tile, and inside a tile four consecutive inputs of one channel
are neighbours, which is what the machine's 8-bit dot products consume (4 products a 32-bit lane, one lane a channel):

    int4 tile, 256 bytes = 4 chunks of 64     chunk c, byte 4*channel + i
    ┌ channel 0 ┬ channel 1 ┬ ... 15 ┐        low nibble:  input 4*c + i
    │ i=0 1 2 3 │ i=0 1 2 3 │        │        high nibble: input 4*(c+4) + i
    └───────────┴───────────┴────────┘        int8 tile, 512 bytes = 8 such chunks, a whole byte each

After the tiles of its 16 channels come their scales (and, for int4, minima), 16 channels of a group side by side: fp16
per group, or one float32 per channel. One row of the packed tensor is therefore one contiguous run of memory that a
product reads from front to back. Source: Intel's VNNI weight layout; codes and groups are GGUF's Q4_1 and Q8_0.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 16  # output channels side by side in a packed tile
GROUP = 32  # inputs per packed tile, and per scale of the 8-bit activations


def padded(in_features: int, group_size: int) -> int:
    step = group_size or GROUP
    return -(-in_features // step) * step


def pack_int4(qweight: Tensor, scales: Tensor, mins: Tensor, group_size: int) -> Tensor:
    """Canonical int4 -> uint8 [tiles, bytes], the form `int4_linear` takes.

    `qweight` uint8 [N, Kp/2]: byte i of a block of 32 weights holds weight i (low nibble) and weight i + 16 (high);
    `scales`, `mins` fp16 [N, Kp/group_size]; the weight is code * scale + min.
    """
    n, half = qweight.shape
    _check_group(2 * half, group_size)
    low_high = qweight.view(n, half // 16, 1, 16)
    steps = _to_tiles(torch.cat((low_high & 15, low_high >> 4), dim=2).view(n, 2 * half))  # [tiles, K32, 8, 64]
    return _join(steps[:, :, :4] | (steps[:, :, 4:] << 4), scales.half(), mins.half())


def unpack_int4(packed: Tensor, in_features: int, group_size: int) -> Tensor:
    """uint8 [tiles, bytes] -> float32 [tiles * 16, in_features], the dequantised weight."""
    k = padded(in_features, group_size)
    nibbles, (scale, low) = _split(packed, k * TILE // 2, torch.float16, 2)
    nibbles = nibbles.reshape(-1, k // GROUP, 4, 4 * TILE)
    codes = _from_tiles(torch.cat((nibbles & 15, nibbles >> 4), dim=2))  # [N, Kp]
    return (codes.view(len(codes), -1, group_size).float() * scale + low).flatten(1)[:, :in_features]


def pack_int8(qweight: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """Canonical int8 -> uint8 [tiles, bytes], the form `int8_linear` takes.

    `qweight` int8 [N, Kp]; `scales` fp16 [N, Kp/group_size], or, with `group_size` 0, float32 [N, 1]: one per row.
    """
    if group_size:
        _check_group(qweight.shape[1], group_size)
    steps = _to_tiles(F.pad(qweight, (0, -qweight.shape[1] % GROUP)).view(torch.uint8))
    return _join(steps, scales.half() if group_size else scales.float())


def unpack_int8(packed: Tensor, in_features: int, group_size: int) -> Tensor:
    """uint8 [tiles, bytes] -> float32 [tiles * 16, in_features], the dequantised weight."""
    k = padded(in_features, group_size)
    steps, (scale,) = _split(packed, k * TILE, torch.float16 if group_size else torch.float32, 1)
    codes = _from_tiles(steps.reshape(-1, k // GROUP, 8, 4 * TILE)).view(torch.int8).float()  # [N, Kp]
    return (codes.view(len(codes), scale.shape[1], -1) * scale).flatten(1)[:, :in_features]


def _to_tiles(codes: Tensor) -> Tensor:  # [N, Kp] uint8 -> [tiles, K32, 8 steps, 16 channels * 4 inputs]
    codes = F.pad(codes, (0, 0, 0, -codes.shape[0] % TILE))
    k = codes.shape[1]
    return codes.view(-1, TILE, k // GROUP, 8, 4).permute(0, 2, 3, 1, 4).reshape(-1, k // GROUP, 8, 4 * TILE)


def _from_tiles(steps: Tensor) -> Tensor:  # the inverse: [tiles, K32, 8, 64] -> [tiles * 16, Kp]
    tiles, groups = steps.shape[:2]
    return steps.view(tiles, groups, 8, TILE, 4).permute(0, 3, 1, 2, 4).reshape(tiles * TILE, groups * GROUP)


def _join(tiles: Tensor, *params: Tensor) -> Tensor:  # tiles [tiles, ...] and params [N, G] -> uint8 [tiles, bytes]
    rows = [F.pad(p, (0, 0, 0, -p.shape[0] % TILE)).view(-1, TILE, p.shape[1]).transpose(1, 2) for p in params]
    return torch.cat((tiles.flatten(1), torch.stack(rows, dim=2).flatten(1).view(torch.uint8)), dim=1)


def _split(packed: Tensor, codes: int, dtype: torch.dtype, count: int) -> tuple[Tensor, list[Tensor]]:
    """The bytes of the codes [tiles, codes], and `count` parameters, float32 [tiles * 16, G, 1] each."""
    params = packed[:, codes:].contiguous().view(dtype).view(len(packed), -1, count, TILE)
    return packed[:, :codes], [p.transpose(1, 2).reshape(len(packed) * TILE, -1, 1).float() for p in params.unbind(2)]


def _check_group(k: int, group_size: int) -> None:
    if group_size <= 0 or group_size % GROUP or k % group_size:
        raise ValueError(
            f"group_size {group_size} does not fit a padded row of {k} weights: it must be a multiple of {GROUP} "
            f"that divides the row; pad the row with zero codes to a multiple of the group first"
        )
