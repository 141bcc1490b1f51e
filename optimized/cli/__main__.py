"""``python -m optimized.cli`` is ``kvproof``."""

from optimized.cli import main

if __name__ == "__main__":
    main()
