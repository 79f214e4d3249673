"""Which drafter an engine runs, from its settings, and the drafts that the host gives."""

import dataclasses
import random
from typing import Any

from qwen_hybrid.config import HybridConfig
from serve.model_path import resolve_draft_path
from serve.request import Request
from spec import NO_DRAFTS, AbstractDrafter, GivenDrafts, MtpDrafter, PromptLookup
from spec.dspark import DSparkDrafter, load_draft, prepare_draft, read_draft_config

NEXTN, NGRAM, DSPARK = "NEXTN", "NGRAM", "DSPARK"
# Widths count the target's own token, as SGLang does.
DEFAULT_WIDTH = {NEXTN: 4, NGRAM: 8, DSPARK: 8}
MAX_WIDTH = 17
ALIASES = {"MTP": NEXTN, "EAGLE": NEXTN}
REJECT, ORACLE, RANDOM, ACCEPT, ADVERSARIAL = "reject", "oracle", "random", "accept", "adversarial"
DEBUG_HELP = "reject, accept:N, oracle, adversarial:K or random"


@dataclasses.dataclass(frozen=True)
class Debug:
    """A drafter for diagnosis: `kind`, and the number after its colon."""

    kind: str
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> "Debug":
        """Read `reject`, `accept:N`, `oracle`, `adversarial:K` or `random`.

        Raises:
          ValueError: something else.
        """
        kind, colon, number = text.partition(":")
        is_number = number.isdecimal()
        if kind in (ACCEPT, ADVERSARIAL) and is_number:
            return cls(kind, int(number))
        if kind in (REJECT, ORACLE, RANDOM) and not colon:
            return cls(kind)
        raise ValueError(f"speculative_debug must be {DEBUG_HELP}, got {text!r}")


@dataclasses.dataclass(frozen=True)
class Given:
    """Drafts of the host for a row, and limits on how many are accepted.

    Attributes:
      tokens: the drafts; a drafter on the device has its own.
      max_accepted: accept no more.
      min_accepted: accept so many whatever the target samples; the text is arbitrary then.
    """

    tokens: list[int]
    max_accepted: int
    min_accepted: int = 0


class Speculation:
    """How an engine drafts.

    Attributes:
      drafter: what runs on the device.
      params: its own parameters, in the form that operators compute with; an empty tree without.
    """

    def __init__(
        self,
        drafter: AbstractDrafter = NO_DRAFTS,
        *,
        params: Any = None,
        debug: Debug | None = None,
        vocab_size: int = 0,
    ):
        """Draft with `drafter`; where that verifies the host's drafts, by prompt lookup.

        Args:
          debug: drafts for diagnosis in the place of those, or limits on what is accepted.
          vocab_size: of the target.
        """
        self.drafter, self.params = drafter, {} if params is None else params
        self._debug, self._vocab_size = debug, vocab_size
        self._lookups: dict[Request, PromptLookup] = {}
        # What requests with the same prompt and parameters gave before, for the oracle.
        self._outputs: dict[Any, list[int]] = {}

    @property
    def is_on(self) -> bool:
        """Something is drafted."""
        return self.drafter.num_drafts > 0

    @property
    def is_lossless(self) -> bool:
        """Nothing is emitted but what the target samples."""
        return self._debug is None or self._debug.kind != ACCEPT

    def given(self, request: Request, most: int) -> Given:
        """Drafts for the next tokens of a request that is generating."""
        debug = self._debug
        width = self.drafter.num_drafts
        if debug is None:
            return Given(self._looked_up(request, most), width)
        if debug.kind == REJECT:
            return Given(self._drafts(request, most), 0)
        if debug.kind == ACCEPT:
            count = min(debug.number, most)
            return Given(self._random(request, most), count, count)
        return Given(self._drafts(request, most), width)

    def forget(self, request: Request) -> None:
        """A request has ended; its output may be replayed."""
        self._lookups.pop(request, None)
        if self._debug is not None and self._debug.kind in (ORACLE, ADVERSARIAL):
            self._outputs[_key(request)] = list(request.output_ids)

    def _drafts(self, request: Request, most: int) -> list[int]:
        debug = self._debug
        assert debug is not None
        if not isinstance(self.drafter, GivenDrafts):
            return []
        if debug.kind in (REJECT, RANDOM):
            return self._random(request, most)
        expected = request.replay_ids or self._outputs.get(_key(request), ())
        at = len(request.output_ids)
        tokens = list(expected[at : at + most])
        if debug.kind == ADVERSARIAL:
            wrong = [(token + 1) % self._vocab_size for token in tokens[debug.number :]]
            tokens[debug.number :] = wrong
        return tokens

    def _random(self, request: Request, most: int) -> list[int]:
        if not isinstance(self.drafter, GivenDrafts):
            return []
        draw = random.Random(f"{request.seed} {request.committed_len}")
        return [draw.randrange(self._vocab_size) for _ in range(most)]

    def _looked_up(self, request: Request, most: int) -> list[int]:
        if not isinstance(self.drafter, GivenDrafts):
            return []
        if request.replay_ids:
            at = len(request.output_ids)
            return list(request.replay_ids[at : at + most])
        lookup = self._lookups.setdefault(request, PromptLookup())
        known = len(lookup)
        if known < request.prompt_len:
            lookup.extend(request.prompt_ids[known:])
            known = request.prompt_len
        lookup.extend(request.output_ids[known - request.prompt_len :])
        return lookup.draft(most)


def _key(request: Request) -> Any:
    """What two requests that must give the same output have in common."""
    seed = request.seed if request.params.temperature > 0 else 0
    return (tuple(request.prompt_ids), seed, repr(request.params))


def algorithm_of(name: str | None) -> str | None:
    """The algorithm that a name stands for.

    Raises:
      ValueError: unknown, or one that is not here.
    """
    if name is None:
        return None
    known = ALIASES.get(name.upper(), name.upper())
    if known in ("DFLASH", "DFLASH2"):
        raise ValueError(f"speculative_algorithm {name} is not supported; DSPARK is")
    if known not in DEFAULT_WIDTH:
        names = ", ".join(sorted({*DEFAULT_WIDTH, *ALIASES}))
        raise ValueError(f"speculative_algorithm must be one of {names}, got {name!r}")
    return known


def width_of(algorithm: str | None, debug: str | None, width: int | None) -> int:
    """Rows of the widest verify window, the target's own token included; 1 without drafts.

    Raises:
      ValueError: a width that no window has, or one although nothing drafts.
    """
    if algorithm is None and debug is None:
        if width is not None:
            raise ValueError("speculative_num_draft_tokens needs a speculative_algorithm")
        return 1
    if width is None:
        return DEFAULT_WIDTH[algorithm or NEXTN]
    is_int = isinstance(width, int) and not isinstance(width, bool)
    if not is_int or not 2 <= width <= MAX_WIDTH:
        raise ValueError(
            f"speculative_num_draft_tokens must be in [2, {MAX_WIDTH}], got {width!r}; it counts "
            "the target's own token"
        )
    return width


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How to draft, as an engine's configuration has it.

    Attributes:
      algorithm: by its own name, or None.
      width: rows of the widest window.
      debug: drafts for diagnosis, or None.
      draft_model_path: of DSPARK.
      confidence_threshold: of DSPARK.
    """

    algorithm: str | None
    width: int
    debug: str | None
    draft_model_path: str | None
    confidence_threshold: float


def make_drafter(config: HybridConfig, settings: Settings) -> AbstractDrafter:
    """The drafter that an engine with these settings runs; its weights are not read.

    Raises:
      ValueError: the model cannot, or the draft model is another target's.
      FileNotFoundError: no such draft model.
    """
    if settings.algorithm == NEXTN:
        return MtpDrafter(num_drafts=settings.width - 1, config=config)
    if settings.algorithm == DSPARK:
        directory = resolve_draft_path(settings.draft_model_path)
        drafter = DSparkDrafter(
            config=read_draft_config(directory),
            num_drafts=settings.width - 1,
            threshold=settings.confidence_threshold,
        )
        drafter.require_target(config)
        return drafter
    return GivenDrafts(settings.width - 1)


def make_speculation(config: HybridConfig, settings: Settings, *, dtype: str) -> Speculation:
    """The drafter with its weights.

    Args:
      dtype: the target's activation dtype.

    Raises:
      ValueError, FileNotFoundError: as `make_drafter`. CheckpointError: a damaged draft model.
    """
    debug = None if settings.debug is None else Debug.parse(settings.debug)
    drafter, params = make_drafter(config, settings), None
    if isinstance(drafter, DSparkDrafter):
        directory = resolve_draft_path(settings.draft_model_path)
        params = prepare_draft(load_draft(directory, drafter.config, dtype=dtype))
    return Speculation(drafter, params=params, debug=debug, vocab_size=config.vocab_size)
