"""Kernel tests run the Triton kernels in Triton's interpreter, in the process that runs all other tests."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # the interpreter's small products lose time to BLAS threads

from triton import knobs
from triton.language import standard
from triton.runtime.interpreter import InterpretedFunction

if knobs.runtime.interpret and not isinstance(standard.zeros, InterpretedFunction):
    raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set: set it in tests/conftest.py")

from tests.kernels.interpreter import repair_products

repair_products()
