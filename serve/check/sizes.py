"""How long the requests of a check are, and how their prompts are cut: by the block's size."""

import dataclasses

from pallas_kernels.attention import SPAN

# Rows of a short output at most.
SHORT_OUTPUT = 16
# The chunk that stands for random sizes.
RANDOM = 0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Lengths around which something happens.

    Attributes:
      block: tokens of a block.
      prompt_lens: of the prompts; they end on, before and after block boundaries.
      long_outputs: by place in that list: outputs that reach another block, one through a whole
        one.
      chunks: into which prompts are cut.
      context_len: longest prompt plus completion.
    """

    block: int
    prompt_lens: tuple[int, ...]
    long_outputs: dict[int, int]
    chunks: tuple[int, ...]
    context_len: int

    @classmethod
    def of(cls, block: int, max_len: int) -> "Sizes":
        """Sizes for blocks of so many tokens.

        Args:
          max_len: positions that the model has.

        Raises:
          ValueError: they do not hold two blocks.
        """
        if max_len < 2 * block:
            raise ValueError(
                f"a check needs sequences of two blocks of {block} tokens, the model has "
                f"{max_len} positions"
            )
        # Longer than two spans of attention, whatever the block.
        longest = max(4 * block + 14, 2 * SPAN + 14)
        lens = (
            *(1, 2, 15, 16, 17, block - 2, block - 1, block, block + 1, block + 36),
            *(2 * block - 1, 2 * block, 2 * block + 1, 3 * block - 2, 4 * block - 1, longest),
        )
        context = min((-(-(longest + SHORT_OUTPUT) // block) + 1) * block, max_len)
        return cls(
            block,
            tuple(n for n in lens if n + SHORT_OUTPUT <= context),
            {1: block + 6, 4: block - 12, 5: block + 6, 6: 40},
            tuple(dict.fromkeys((1, 17, block - 1, block, block + 1, block + 36))),
            context,
        )

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.prompt_lens)

    @property
    def longest_by_row(self) -> int:
        """Tokens of the longest prompt that is fed row by row, which takes as many steps."""
        return self.block + 36

    @property
    def cuts(self) -> tuple[int, ...]:
        """The ways of cutting a prompt: the chunks, and random sizes."""
        return (*self.chunks, RANDOM)
