"""How each law fared, as data and as a table."""

import dataclasses
from typing import Any

from serve.check.outcome import Parting
from serve.check.trail import StateDifference, split_name

NOT_AVAILABLE = "not available"


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where a run of a request parted from the golden one.

    Attributes:
      where: in which run.
      case: index of the request.
      parting: in what, as its caller sees it.
      schedule: number of the schedule, if it was in one.
      state: the row of the state that differed first, if one did.
    """

    where: str
    case: int
    parting: Parting
    schedule: int | None = None
    state: StateDifference | None = None

    def __str__(self) -> str:
        what = f"{self.state}; {self.parting.text}" if self.state else self.parting.text
        return f"{self.where}, request {self.case}: {what}"

    def to_json(self) -> dict[str, Any]:
        """Plain data; without a state, layer and tensor are those of the digest that differs."""
        layer, tensor, position = None, None, None
        if self.state is not None:
            layer, tensor, position = dataclasses.astuple(self.state)
        elif self.parting.tensor is not None:
            layer, tensor = split_name(self.parting.tensor)
        return {
            "where": self.where,
            "schedule": self.schedule,
            "request": self.case,
            "what": self.parting.text,
            "layer": layer,
            "tensor": tensor,
            "position": position,
        }


@dataclasses.dataclass
class Report:
    """How a law fared.

    Attributes:
      law: which.
      what: changes nothing.
      schedules: runs in which that happened.
      tokens: tokens compared in them.
      first_difference: where a run first parted from the golden one, or None.
      is_available: the engine has the feature.
      missing: what should have happened and did not, or None.
    """

    law: str
    what: str
    schedules: int = 0
    tokens: int = 0
    first_difference: Difference | None = None
    is_available: bool = True
    missing: str | None = None

    def saw(self, tokens: int, difference: Difference | None) -> None:
        """Take in a comparison."""
        self.tokens += tokens
        self.first_difference = self.first_difference or difference

    @property
    def status(self) -> str:
        """`passed`, `failed`, `not available`, or `not tested` where nothing of it happened."""
        if not self.is_available:
            return NOT_AVAILABLE
        if self.first_difference is not None:
            return "failed"
        return "passed" if self.tokens and self.missing is None else "not tested"

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        difference = self.first_difference
        return {
            "law": self.law,
            "what": self.what,
            "status": self.status,
            "schedules": self.schedules,
            "tokens": self.tokens,
            "first_difference": difference.to_json() if difference else None,
            "missing": self.missing,
        }


def table(reports: list[Report]) -> list[str]:
    """Lines of a table."""
    heads = ("law", "nothing changes when", "schedules", "tokens", "first difference")
    width = max(len(heads[1]), *(len(report.what) for report in reports))

    def line(law: str, what: str, schedules: str, tokens: str, difference: str) -> str:
        return f"{law:<5}{what:<{width + 2}}{schedules:>9}{tokens:>9}  {difference}"

    return [line(*heads), *(line(*_cells(report)) for report in reports)]


def _cells(report: Report) -> tuple[str, str, str, str, str]:
    if not report.is_available:
        return report.law, report.what, "-", "-", NOT_AVAILABLE
    last = str(report.first_difference or "none")
    if report.status == "not tested":
        last = f"not tested: {report.missing or 'it never happened'}"
    return report.law, report.what, f"{report.schedules:,}", f"{report.tokens:,}", last
