"""Speculative decoding as pure functions: draft, verify, commit over one state."""

from spec.accept import accept as accept
from spec.drafter import NO_DRAFTS as NO_DRAFTS
from spec.drafter import AbstractDrafter as AbstractDrafter
from spec.drafter import GivenDrafts as GivenDrafts
from spec.drafter import Observed as Observed
from spec.drafter import Target as Target
from spec.fixed_batch import parameters as parameters
from spec.fixed_batch import ready as ready
from spec.fixed_batch import round_call as round_call
from spec.fixed_batch import start as start
from spec.layout import Layout as Layout
from spec.layout import with_drafts as with_drafts
from spec.mtp import MtpDrafter as MtpDrafter
from spec.prompt_lookup import PromptLookup as PromptLookup
from spec.state import Accepted as Accepted
from spec.state import Proposal as Proposal
from spec.state import SpecCall as SpecCall
from spec.state import SpecState as SpecState
from spec.state import StepOutput as StepOutput
from spec.step import Verified as Verified
from spec.step import committed as committed
from spec.step import observed as observed
from spec.step import step as step
from spec.step import verify as verify
