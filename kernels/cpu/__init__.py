"""The CPU's fast path: products and attention over bf16 for processors with AVX-512 or AVX2, generated at the first start."""
