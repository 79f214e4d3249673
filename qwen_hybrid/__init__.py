"""Qwen hybrid language models as pure functions over parameters and explicit state."""

from pallas_kernels.gated_delta_net import StateDtype as StateDtype
from pallas_kernels.sampling import Sampling as Sampling
from qwen_hybrid.config import HybridConfig as HybridConfig
from qwen_hybrid.dspark_config import DSparkConfig as DSparkConfig
from qwen_hybrid.model import HybridModel as HybridModel
from qwen_hybrid.model import SequenceOutput as SequenceOutput
from qwen_hybrid.numerics import Numerics as Numerics
from qwen_hybrid.state import Call as Call
from qwen_hybrid.state import ModelState as ModelState
from qwen_hybrid.state import Sequences as Sequences
from qwen_hybrid.state import StateConfig as StateConfig
from qwen_hybrid.state import commit as commit
from qwen_hybrid.state import init_state as init_state
from qwen_hybrid.state import inventory as inventory
from qwen_hybrid.state import state_spec as state_spec
from qwen_hybrid.step import COMPILER_OPTIONS as COMPILER_OPTIONS
from qwen_hybrid.step import Chosen as Chosen
from qwen_hybrid.step import Reads as Reads
from qwen_hybrid.step import logits as logits
from qwen_hybrid.weights import Checkpoint as Checkpoint
from qwen_hybrid.weights import CheckpointError as CheckpointError
from qwen_hybrid.weights import dummy_params as dummy_params
from qwen_hybrid.weights import load_checkpoint as load_checkpoint
from qwen_hybrid.weights import load_params as load_params
from qwen_hybrid.weights import save_hf as save_hf
