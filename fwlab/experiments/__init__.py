"""Published results, each reproduced by `fwlab reproduce NAME`."""

from fwlab.experiments import (
    ablation,
    aft,
    aft_stability,
    capacity,
    favor_underflow,
    feedback_curriculum,
    feedback_depth,
    feedback_variables,
    language_model,
    overwrite,
    recall,
    reversal,
    state_size,
    state_tracking,
    translation,
)
from fwlab.experiments.experiment import Claim, Experiment, Point, verdict
from fwlab.experiments.runs import Runs, results

#: All experiments by name.
EXPERIMENTS = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        capacity,
        overwrite,
        favor_underflow,
        ablation,
        language_model,
        recall,
        state_size,
        translation,
        aft,
        aft_stability,
        feedback_variables,
        feedback_depth,
        feedback_curriculum,
        state_tracking,
        reversal,
    )
}

__all__ = ["EXPERIMENTS", "Claim", "Experiment", "Point", "Runs", "results", "verdict"]
