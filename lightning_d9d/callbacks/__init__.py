"""Lightning callbacks.

- Before a fit: `initial_weights.py` loads weights of a checkpoint.
- At the end of a fit: `loss_curve.py` draws its losses, and `text_sample.py` prints text that a byte-level model
  generates. `export.py` writes a trained model, or its adapters, as a Hugging Face directory.
- Weights: `weight_averages.py` averages them over steps, and `histograms.py` logs the distribution of their values.
- Speed: `run_metrics.py` logs how fast a fit is and where its time goes. `start_times.py` measures the start of a run,
  and `data_wait.py` the wait for batches. `step_profile.py` traces selected steps and the memory, and draws pipelines
  with `measured_step.py`. `pipeline_timeline.py` draws one step in the same way. `stragglers.py` names slow ranks.
- Progress: `progress_lines.py` writes lines where no progress bar is seen. `background_loggers.py` keeps loggers from
  ending or stalling a fit, and continues their runs. `garbage_collection.py` collects Python's garbage on all ranks
  together.
- Faults: `find_nonfinite.py` names the module at which a step became NaN.
- Predictions: `predictions.py` writes the results of `predict`.
"""

from lightning_d9d.callbacks.background_loggers import BackgroundLoggers
from lightning_d9d.callbacks.data_wait import DataWait
from lightning_d9d.callbacks.export import AdapterExport, HuggingFaceExport
from lightning_d9d.callbacks.find_nonfinite import FindNonfinite
from lightning_d9d.callbacks.garbage_collection import GarbageCollection
from lightning_d9d.callbacks.histograms import Histograms
from lightning_d9d.callbacks.initial_weights import InitialWeights
from lightning_d9d.callbacks.loss_curve import LossCurve
from lightning_d9d.callbacks.measured_step import MeasuredStep
from lightning_d9d.callbacks.pipeline_timeline import PipelineTimeline
from lightning_d9d.callbacks.predictions import PredictionWriter
from lightning_d9d.callbacks.progress_lines import ProgressLines
from lightning_d9d.callbacks.run_metrics import RunMetrics
from lightning_d9d.callbacks.start_times import StartTimes
from lightning_d9d.callbacks.step_profile import StepProfile
from lightning_d9d.callbacks.stragglers import Stragglers
from lightning_d9d.callbacks.text_sample import TextSample
from lightning_d9d.callbacks.weight_averages import WeightAverages

__all__ = [
    "AdapterExport",
    "BackgroundLoggers",
    "DataWait",
    "FindNonfinite",
    "GarbageCollection",
    "Histograms",
    "HuggingFaceExport",
    "InitialWeights",
    "LossCurve",
    "MeasuredStep",
    "PipelineTimeline",
    "PredictionWriter",
    "ProgressLines",
    "RunMetrics",
    "StartTimes",
    "StepProfile",
    "Stragglers",
    "TextSample",
    "WeightAverages",
]
