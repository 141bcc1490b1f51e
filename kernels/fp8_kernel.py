"""Numbers of 8 bits (e4m3) with a scale for each token and head: encoded on their way into the cache, decoded on theirs out.

    scale    2^k, the least power of two with max(|x|) <= 448 * 2^k over the token's head; NaN where some x is no number
    byte     x / scale, rounded to the nearest e4m3, ties to even: sign, 4 bits of exponent (bias 7), 3 of mantissa
    scales   [num_blocks, block_size, num_kv_heads, 2] bfloat16: of K, of V; read and written as one int32

A power of two multiplies without rounding, so what is decoded is exact in float32, bfloat16 and float16. No byte that is
written is a NaN: the scale carries it. Everything is done on bits, so that every target, and Triton's interpreter, gives
the same bytes; a target with an instruction for it decodes by that.
"""

import triton
import triton.language as tl


@triton.jit
def decoded(byte, IS_NATIVE: tl.constexpr):
    """The e4m3 as float32, without its scale."""
    if IS_NATIVE:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = byte.to(tl.uint16)  # where a float16 has these bits they are 2^-8 of it: its exponent's bias is 15, not 7
    bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def scale_pair(pair):
    """The scales of K and of V, float32, out of the int32 that holds both as bfloat16."""
    return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def sizes(numbers):
    """The bits of |x|, which as integers are ordered as the numbers are, with infinity and then NaN above them."""
    return numbers.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def exponent_of(most, LARGEST: tl.constexpr):
    """The scale's exponent, with float32's bias, for the largest of a head's ``sizes``; 255 if one is no number.

    ``LARGEST`` are the bits of the largest e4m3 times a power of two that the cache's readers can hold: numbers above
    count as that, which is within the rounding of e4m3.
    """
    exponent = tl.maximum(((tl.minimum(most, LARGEST) + 0x1FFFFF) >> 23) - 8, 1)  # 448 is 1.75 * 2^8
    return tl.where(most < 0x7F800000, exponent, 255)


@triton.jit
def scale_bits(exponent):
    """The scale as bfloat16, in the low half of an int32."""
    return tl.where(exponent < 255, exponent << 7, 0x7FC0)


@triton.jit
def encoded(numbers, exponent, LARGEST: tl.constexpr):
    """The bytes of float32 numbers; 0 where the exponent says that the head has no scale."""
    inverse = ((254 - tl.minimum(exponent, 253)) << 23).to(tl.float32, bitcast=True)
    scaled = tl.minimum(sizes(numbers), LARGEST).to(tl.float32, bitcast=True) * inverse
    bits = scaled.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = (scaled + 16384.0).to(tl.int32, bitcast=True) & 0xF  # 2^14 has the last place 2^-9, the least e4m3
    size = tl.where(bits < 0x3C800000, small, normal)  # 2^-6, the least with an exponent of its own
    sign = (numbers.to(tl.int32, bitcast=True) >> 24) & 0x80
    return tl.where(exponent < 255, size | sign, 0).to(tl.uint8)
