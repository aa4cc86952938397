"""Quantised weights in the one packed form that every backend of kernels.py reads.

The problem. A product over 4-bit weights must open up two codes a byte, meet them with the right activations and add
in a wide enough sum, at the speed at which memory delivers them. The canonical storage (what files hold, and what
quantize.py explains) is row after row, so neighbouring bytes belong to one output and the machine's lanes to none.

The idea. Sixteen output channels by 32 inputs are one tile, and inside a tile four consecutive inputs of one channel
are neighbours, which is what the machine's 8-bit dot products consume (AVX2 `maddubs`, AVX-512 VNNI `dpbusd`: 4
products a 32-bit lane, one lane a channel):

    int4 tile, 256 bytes = 4 chunks of 64     chunk c, byte 4*channel + i
    ┌ channel 0 ┬ channel 1 ┬ ... 15 ┐        low nibble:  input 4*c + i
    │ i=0 1 2 3 │ i=0 1 2 3 │        │        high nibble: input 4*(c+4) + i
    └───────────┴───────────┴────────┘        int8 tile, 512 bytes = 8 such chunks, a whole byte each

After the tiles of its 16 channels come their scales (and, for int4, minima), 16 channels of a group side by side: fp16
per group, or one float32 per channel. One row of the packed tensor is therefore one contiguous run of memory that a
product reads from front to back, and the size is that of the canonical form (channels rounded up to 16).

Source: the interleaving is the usual one for 4-wide integer dot products (Intel's VNNI weight layout); the codes and
groups are those of GGUF's Q4_1 and Q8_0. Left out: other widths, and tiles of other shapes for other machines.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 16  # output channels side by side in a packed tile
GROUP = 32  # inputs per packed tile, and per scale of the 8-bit activations


def pack_int4(qweight: Tensor, scales: Tensor, mins: Tensor, group_size: int) -> Tensor:
    """Canonical int4 -> uint8 [tiles, bytes], the form `int4_linear` takes.

    `qweight` uint8 [N, Kp/2]: byte i of a block of 32 weights holds weight i (low nibble) and weight i + 16 (high);
    `scales`, `mins` fp16 [N, Kp/group_size]; the weight is code * scale + min.
    """
    n, half = qweight.shape
    _check_group(2 * half, group_size)
    low_high = qweight.view(n, half // 16, 1, 16)
    codes = torch.cat((low_high & 15, low_high >> 4), dim=2).view(n, 2 * half)  # [N, Kp]
    steps = _to_tiles(codes)  # [tiles, K32, 8, 64]
    nibbles = steps[:, :, :4] | (steps[:, :, 4:] << 4)  # [tiles, K32, 4, 64]
    params = torch.stack((_channels_last(scales.half()), _channels_last(mins.half())), dim=2)  # [tiles, G, 2, 16]
    return torch.cat((nibbles.flatten(1), _as_bytes(params)), dim=1)


def unpack_int4(packed: Tensor, in_features: int, group_size: int) -> Tensor:
    """uint8 [tiles, bytes] -> float32 [tiles * 16, in_features], the dequantised weight."""
    k = padded(in_features, group_size)
    nibbles = packed[:, : k * TILE // 2].reshape(-1, k // GROUP, 4, 4 * TILE)
    codes = _from_tiles(torch.cat((nibbles & 15, nibbles >> 4), dim=2))  # [N, Kp]
    params = packed[:, k * TILE // 2 :].contiguous().view(torch.float16).view(-1, k // group_size, 2, TILE)
    scale, low = (p.transpose(1, 2).reshape(codes.shape[0], -1, 1).float() for p in params.unbind(2))  # [N, G, 1]
    weight = codes.view(codes.shape[0], -1, group_size).float() * scale + low
    return weight.flatten(1)[:, :in_features]


def pack_int8(qweight: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """Canonical int8 -> uint8 [tiles, bytes], the form `int8_linear` takes.

    `qweight` int8 [N, Kp]; `scales` fp16 [N, Kp/group_size], or, with `group_size` 0, float32 [N, 1]: one per row.
    """
    if group_size:
        _check_group(qweight.shape[1], group_size)
    elif qweight.shape[1] % GROUP:
        qweight = F.pad(qweight, (0, -qweight.shape[1] % GROUP))
    params = _channels_last(scales.half() if group_size else scales.float())  # [tiles, G, 16]
    return torch.cat((_to_tiles(qweight.view(torch.uint8)).flatten(1), _as_bytes(params)), dim=1)


def unpack_int8(packed: Tensor, in_features: int, group_size: int) -> Tensor:
    """uint8 [tiles, bytes] -> float32 [tiles * 16, in_features], the dequantised weight."""
    k = padded(in_features, group_size)
    steps = packed[:, : k * TILE].reshape(-1, k // GROUP, 8, 4 * TILE)
    codes = _from_tiles(steps).view(torch.int8).float()  # [N, Kp]
    dtype = torch.float16 if group_size else torch.float32
    params = packed[:, k * TILE :].contiguous().view(dtype).view(packed.shape[0], -1, TILE)
    scale = params.transpose(1, 2).reshape(codes.shape[0], -1, 1).float()  # [N, G, 1]
    return (codes.view(codes.shape[0], scale.shape[1], -1) * scale).flatten(1)[:, :in_features]


def _to_tiles(codes: Tensor) -> Tensor:  # [N, Kp] uint8 -> [tiles, K32, 8 steps, 16 channels * 4 inputs]
    codes = F.pad(codes, (0, 0, 0, -codes.shape[0] % TILE))
    k = codes.shape[1]
    return codes.view(-1, TILE, k // GROUP, 8, 4).permute(0, 2, 3, 1, 4).reshape(-1, k // GROUP, 8, 4 * TILE)


def _from_tiles(steps: Tensor) -> Tensor:  # the inverse: [tiles, K32, 8, 64] -> [tiles * 16, Kp]
    tiles, groups = steps.shape[:2]
    return steps.view(tiles, groups, 8, TILE, 4).permute(0, 3, 1, 2, 4).reshape(tiles * TILE, groups * GROUP)


def _channels_last(params: Tensor) -> Tensor:  # [N, G] -> [tiles, G, 16]
    params = F.pad(params, (0, 0, 0, -params.shape[0] % TILE))
    return params.view(-1, TILE, params.shape[1]).transpose(1, 2).contiguous()


def _as_bytes(params: Tensor) -> Tensor:  # [tiles, ...] of any dtype -> uint8 [tiles, bytes]
    return params.flatten(1).contiguous().view(torch.uint8)


def padded(in_features: int, group_size: int) -> int:
    step = group_size or GROUP
    return -(-in_features // step) * step


def _check_group(k: int, group_size: int) -> None:
    if group_size <= 0 or group_size % GROUP or k % group_size:
        raise ValueError(
            f"group_size {group_size} does not fit a padded row of {k} weights: it must be a multiple of {GROUP} "
            f"that divides the row; pad the row with zero codes to a multiple of the group first"
        )
