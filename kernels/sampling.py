"""Tokens drawn from logits, by the device of the tensors."""

from torch import Tensor


def draw_tokens(
    logits: Tensor, temperatures: Tensor, log_min_ps: Tensor, top_ks: Tensor, top_ps: Tensor, keys: Tensor
) -> Tensor:
    """A token for each row of ``logits`` [num_samples, vocab_size] float32, [num_samples] int64.

    ``temperatures`` [num_samples] float64: 0 takes the largest logit, any other draws from the softmax of
    logits / temperature, by the largest sum with Gumbel noise. ``log_min_ps`` [num_samples] float64 leaves out tokens
    that lie further below the largest than that; -inf leaves out none. ``top_ks`` [num_samples] int64 keeps so many of the
    likeliest, 0 keeps all; ``top_ps`` [num_samples] float64 then keeps the likeliest that have so much of the weight, 1
    keeps all. ``keys`` [num_samples] int64 are 64 bits that
    decide the noise together with the token id, as ``kernels.sampling_kernel`` defines it. A row with a NaN, or whose
    largest number is infinite, gives ``NO_TOKEN``.
    """
    if logits.is_cuda:
        from kernels.sampling_launch import triton_draw_tokens as draw
    else:
        from kernels.sampling_twin import cpu_draw_tokens as draw
    return draw(logits, temperatures, log_min_ps, top_ks, top_ps, keys)
