"""Making a trace small enough to compute: its lengths and its time, by factors that are stated."""

from __future__ import annotations

from dataclasses import dataclass

from cases.trace_files import TRACE_BLOCK, Row, Trace

_INPUT_SHARE = 0.75
"""Part of the token limit that inputs may fill; outputs fill the rest."""
_FITTING = 0.9
"""Part of the requests that fit their limit once scaled; the others are cut."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """One request after scaling. `blocks`: ids of its leading blocks, `Scaling.block_tokens` tokens each."""

    arrival: float
    input_len: int
    output_len: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Scaling:
    """How lengths and time shrink.

    An input of n tokens becomes n * `input_factor`, an output n * `output_factor`, rounded, at least 1 and
    at most `input_limit` and `output_limit`. In a trace with block ids every full block of 512 tokens
    becomes `block_tokens` tokens, a multiple of the page size, so that equal leading blocks stay equal
    whole pages; a long input loses blocks at its end and keeps its ragged tail. One engine step takes
    `seconds_per_step` of the trace's time.
    """

    input_factor: float
    output_factor: float
    input_limit: int
    output_limit: int
    block_tokens: int
    page_size: int
    seconds_per_step: float

    def __str__(self) -> str:
        return (
            f"inputs x {self.input_factor:.4g} up to {self.input_limit} tokens,"
            f" outputs x {self.output_factor:.4g} up to {self.output_limit},"
            f" blocks of {TRACE_BLOCK} as {self.block_tokens}, {self.seconds_per_step:.3g} s a step"
        )

    def apply(self, row: Row) -> Scaled:
        output = min(max(1, round(row.output_len * self.output_factor)), self.output_limit)
        tokens, blocks = self._input(row)
        return Scaled(row.arrival, tokens, output, blocks)

    def _input(self, row: Row) -> tuple[int, tuple[int, ...]]:
        if not row.blocks:
            tokens = max(1, round(row.input_len * self.input_factor))
            if tokens > self.input_limit:
                tokens = self.input_limit - tokens % self.page_size
            return tokens, ()
        tail = round((row.input_len % TRACE_BLOCK) * self.input_factor)
        blocks = row.blocks[: (self.input_limit - tail) // self.block_tokens]
        return len(blocks) * self.block_tokens + tail, blocks


def fit(trace: Trace, *, page_size: int, token_limit: int, occupancy: float) -> Scaling:
    """The scaling at which nine of ten requests fit `token_limit` and `occupancy` of them run on average.

    Average by Little's law, with one step for each token of output and one for the prompt. Where 512 tokens
    would come out as less than a page, a block is one page and more requests are cut.

    Raises:
        ValueError: `token_limit` leaves no room for one page of input and a token of output.
    """
    input_limit = int(token_limit * _INPUT_SHARE) // page_size * page_size
    if not input_limit:
        raise ValueError(f"token_limit {token_limit} is too small for page_size {page_size}")
    output_limit = token_limit - input_limit
    input_factor = min(1.0, input_limit / _quantile([row.input_len for row in trace.rows]))
    output_factor = min(1.0, output_limit / _quantile([max(1, row.output_len) for row in trace.rows]))
    block_tokens = page_size
    if any(row.blocks for row in trace.rows):
        block_tokens = max(1, round(TRACE_BLOCK * input_factor / page_size)) * page_size
        input_factor = block_tokens / TRACE_BLOCK
    lengths = [min(max(1, round(row.output_len * output_factor)), output_limit) for row in trace.rows]
    duration = trace.rows[-1].arrival or 1.0
    # rows / duration requests arrive a second, each stays sum(lengths) / rows + 1 steps
    seconds = occupancy * duration / (sum(lengths) + len(lengths))
    return Scaling(input_factor, output_factor, input_limit, output_limit, block_tokens, page_size, seconds)


def _quantile(values: list[int]) -> int:
    return sorted(values)[int((len(values) - 1) * _FITTING)]
