"""What a layer does around attention, by the device of its tensors."""

from torch import Tensor

from kernels.layer_arguments import QKNorm


def rms_norm(hidden: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """``hidden / sqrt(mean(hidden^2) + eps) * weight`` of each row, [num_tokens, hidden_size]."""
    if hidden.is_cuda:
        from kernels.layer_launch import triton_rms_norm as norm
    else:
        from kernels.layer_twin import cpu_rms_norm as norm
    return norm(hidden, weight, eps=eps)


def add_rms_norm(hidden: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of ``hidden + residual``, and that sum, which is the next residual; the norm is of the rounded sum."""
    if hidden.is_cuda:
        from kernels.layer_launch import triton_add_rms_norm as norm
    else:
        from kernels.layer_twin import cpu_add_rms_norm as norm
    return norm(hidden, residual, weight, eps=eps)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """``gate / (1 + e^-gate) * up``, [num_tokens, size]; both may be views of one fused projection."""
    if gate.is_cuda:
        from kernels.layer_launch import triton_silu_mul as multiply
    else:
        from kernels.layer_twin import cpu_silu_mul as multiply
    return multiply(gate, up)


def rotate_write(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    rotation: Tensor,
    *,
    is_interleaved: bool = False,
    norm: QKNorm | None = None,
    kv_scales: Tensor | None = None,
) -> None:
    """``query`` is rotated in place; the rotated key, and the value, go into their slots as by ``write_kv``, into an
    fp8 cache with their ``kv_scales``.

    ``rotation`` is [max_position, 2, rotary_size // 2] float32 with the cosines and the sines of each position;
    dimensions past ``rotary_size`` are left as they are. A pair is dimension i of each half of a head, or two
    neighbours where ``is_interleaved``. With a ``norm`` each head is first normed by it.
    """
    if query.is_cuda:
        from kernels.layer_launch import triton_rotate_write as rotate
    else:
        from kernels.layer_twin import cpu_rotate_write as rotate
    tensors = (query, key, value, key_cache, value_cache, positions, slot_mapping, rotation)
    rotate(*tensors, is_interleaved=is_interleaved, norm=norm, kv_scales=kv_scales)
