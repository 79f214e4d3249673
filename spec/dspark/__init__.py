"""The DSpark drafter: blocks of drafts from one pass over the target's tapped rows."""

from spec.dspark.drafter import DSparkDrafter as DSparkDrafter
from spec.dspark.model import Anchors as Anchors
from spec.dspark.model import draft_len as draft_len
from spec.dspark.model import inject as inject
from spec.dspark.model import propose as propose
from spec.dspark.params import dspark_specs as dspark_specs
from spec.dspark.params import load_draft as load_draft
from spec.dspark.params import prepare_draft as prepare_draft
from spec.dspark.params import random_draft as random_draft
from spec.dspark.params import read_draft_config as read_draft_config
from spec.dspark.params import save_draft as save_draft
from spec.dspark.reference import BlockOutput as BlockOutput
from spec.dspark.reference import block_heads as block_heads
from spec.dspark.reference import block_rows as block_rows
from spec.dspark.state import DSparkState as DSparkState
from spec.dspark.state import dspark_state_spec as dspark_state_spec
from spec.dspark.state import init_dspark_state as init_dspark_state
