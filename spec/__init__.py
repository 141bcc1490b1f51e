"""What paged attention means: an executable specification, and the rules that judge any engine.

Read the modules in this order: ``vocabulary``, ``choices``, ``engine``, ``rules``; then the chapters ``allocator``, ``block_table``,
``sharing``, ``prefix_cache``, ``preemption``, ``scheduler``, ``attention``; then ``replay``, which puts them together.
"""

from spec import (  # noqa: F401, I001  the chapters enter their rules, in this order
    allocator,
    block_table,
    sharing,
    prefix_cache,
    preemption,
    scheduler,
    attention,
    interface,
)
