"""Published results, each reproduced by `fwlab reproduce NAME`."""

from fwlab.experiments import (
    aft_stability,
    capacity,
    favor_underflow,
    feedback_variables,
    overwrite,
    reversal,
    state_tracking,
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
        feedback_variables,
    )
}

__all__ = ["EXPERIMENTS", "Claim", "Experiment", "Point", "Runs", "verdict"]
