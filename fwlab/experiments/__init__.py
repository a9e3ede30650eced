"""Published results, each reproduced by `fwlab reproduce NAME`."""

from fwlab.experiments import (
    ablation,
    aft,
    aft_stability,
    capacity,
    favor_underflow,
    language_model,
    overwrite,
    recall,
    reversal,
    state_size,
    state_tracking,
    translation,
)
from fwlab.experiments.experiment import Claim, Experiment, Point, verdict
from fwlab.experiments.runs import Runs

#: All experiments by name.
EXPERIMENTS = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        capacity,
        overwrite,
        favor_underflow,
        reversal,
        aft_stability,
        state_tracking,
        recall,
        translation,
        aft,
        language_model,
        ablation,
        state_size,
    )
}

__all__ = ["EXPERIMENTS", "Claim", "Experiment", "Point", "Runs", "verdict"]
