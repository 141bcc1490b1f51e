"""The CPU's fast path: bf16 products and attention for processors with AVX-512, generated at the first start."""
