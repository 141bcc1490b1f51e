"""Where Triton kernels can run: on a GPU, or on CPU tensors in Triton's interpreter."""

from torch import Tensor
from triton import knobs

from kernels.arguments import BadArgument


def check_device(argument: str, tensor: Tensor) -> None:
    if not tensor.is_cuda and not knobs.runtime.interpret:
        raise BadArgument(
            argument, "device", tensor.device, "a GPU, or TRITON_INTERPRET=1 set before triton is imported"
        )
