"""A toy: blocks for sequences that only grow. It knows nothing of kvproof."""


class Toy:
    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = list(range(num_blocks))
        self.users = [0] * num_blocks
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def blocks_lacking(self, name: str, num_tokens: int) -> int:
        """How many blocks the sequence lacks for so many more tokens."""
        length = self.lengths.get(name, 0) + num_tokens
        return -(-length // self.block_size) - len(self.tables.get(name, []))

    def grow(self, name: str, num_tokens: int) -> list[int]:
        """Room for more tokens of a sequence, new or not; the blocks that it was given."""
        taken = [self.free.pop(0) for _ in range(self.blocks_lacking(name, num_tokens))]
        for block in taken:
            self.users[block] += 1
        self.tables.setdefault(name, []).extend(taken)
        self.lengths[name] = self.lengths.get(name, 0) + num_tokens
        return taken

    def slots(self, name: str, start: int, stop: int) -> list[int]:
        """Where these tokens of the sequence lie."""
        table, size = self.tables[name], self.block_size
        return [table[at // size] * size + at % size for at in range(start, stop)]

    def drop(self, name: str) -> None:
        """The sequence ends."""
        for block in self.tables.pop(name):
            self.users[block] -= 1
            self.free.append(block)
        del self.lengths[name]
