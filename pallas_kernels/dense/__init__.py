"""Dense product."""

from pallas_kernels.dense.api import InputMajor as InputMajor
from pallas_kernels.dense.api import dense as dense
from pallas_kernels.dense.api import linear as linear
