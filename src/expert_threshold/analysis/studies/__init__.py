"""What `et analyze` looks at: for each figure the numbers it is drawn from, and a sentence on what is seen in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from .. import figures
from ..material import Material
from ..plain import Data
from . import learning

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Study(NamedTuple):
    """compute raises NotShownError where the figure has no meaning; draw takes the data and a width in inches."""

    name: str  # of its files
    section: str
    title: str
    compute: Callable[[Material], Data]
    draw: Callable[..., Figure]
    say: Callable[[Data], str]
    wide: bool = True


LEARNING = "Learning"
STUDIES = [
    Study("loss_by_method", LEARNING, "Evaluation loss by method", learning.loss_by_method, figures.loss_by_method,
          learning.say_loss_by_method),
    Study("token_multiple", LEARNING, "Token multiple at equal loss", learning.token_multiple, figures.token_multiple,
          learning.say_token_multiple),
    Study("batch_size_scaling", LEARNING, "Batch size scaling", learning.batch_size_scaling,
          figures.batch_size_scaling, learning.say_batch_size_scaling, wide=False),
    Study("train_against_validation", LEARNING, "Train against evaluation loss", learning.train_against_validation,
          figures.train_against_validation, learning.say_train_against_validation),
    Study("shared_expert", LEARNING, "Shared expert on and off", learning.shared_expert, figures.shared_expert,
          learning.say_shared_expert, wide=False),
    Study("fanout_norm", LEARNING, "With and without fanout norm", learning.fanout_norm, figures.fanout_norm,
          learning.say_fanout_norm, wide=False),
]  # fmt: skip
