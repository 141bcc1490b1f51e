"""Unbounded proofs about the core: for every number of blocks and sequences, every table length, every block size.

Read ``transitions`` for what may happen, ``clauses`` for what then always holds, ``laws`` and ``liveness`` for what
stands beside them, and ``mutations`` for what breaks if one line is changed. ``prove.prove`` proves all of it,
``matrix.matrix`` shows it, and ``edges.check_edge`` ties it to the executable specification. Importing the package
loads no solver.
"""
