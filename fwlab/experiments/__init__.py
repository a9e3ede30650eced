"""Published results, each reproduced by `fwlab reproduce NAME`."""

from importlib import import_module

from fwlab.experiments.experiment import Claim, Experiment, Point, verdict
from fwlab.experiments.runs import Runs, results

_MODULES = (
    *("capacity", "overwrite", "favor_underflow", "ablation", "language_model"),
    *("recall", "state_size", "translation", "aft", "aft_stability"),
    *("feedback_variables", "feedback_depth", "feedback_curriculum"),
    *("state_tracking", "reversal", "replacing", "regression"),
    *("mqar", "length", "formal", "hybrid"),
)

#: All experiments by name.
EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        import_module(f"{__name__}.{module}").EXPERIMENT for module in _MODULES
    )
}

__all__ = ["EXPERIMENTS", "Claim", "Experiment", "Point", "Runs", "results", "verdict"]
