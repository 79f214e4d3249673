"""Plain decoding beside verify rounds, state by state; faults that show what drift looks like."""

from spec.drift.compare import Difference as Difference
from spec.drift.compare import difference as difference
from spec.drift.experiment import Cell as Cell
from spec.drift.experiment import Point as Point
from spec.drift.experiment import Report as Report
from spec.drift.experiment import Rounds as Rounds
from spec.drift.experiment import Token as Token
from spec.drift.experiment import run as run
from spec.drift.experiment import tokens_needed as tokens_needed
from spec.drift.faults import Fault as Fault
from spec.drift.heat_map import magnitudes as magnitudes
from spec.drift.heat_map import name as name
from spec.drift.heat_map import write_heat_map as write_heat_map
from spec.drift.program import Program as Program
