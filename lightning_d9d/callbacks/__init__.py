"""Lightning callbacks.

`loss_curve.py` draws the losses of a fit, `text_sample.py` prints what a byte-level model writes, `export.py` leaves
a trained model, or its adapters, as a Hugging Face directory; these act at the end of `fit`. `initial_weights.py`
begins one with weights of a checkpoint. `predictions.py` writes what `predict` predicts. `pipeline_timeline.py`
measures one step of a pipeline, `start_times.py` the start of a fit, and `data_wait.py` the wait for batches.
`step_profile.py` traces chosen steps and the memory, and draws pipelines (`measured_step.py`). `run_metrics.py` logs
how fast a fit is and where its time goes. `stragglers.py` names slow ranks. `garbage_collection.py` collects Python's
garbage on all ranks together. `background_loggers.py` keeps loggers from ending or stalling a fit, and goes on with
their runs. `weight_averages.py` averages weights over the steps of a fit.
"""

from lightning_d9d.callbacks.background_loggers import BackgroundLoggers
from lightning_d9d.callbacks.data_wait import DataWait
from lightning_d9d.callbacks.export import AdapterExport, HuggingFaceExport
from lightning_d9d.callbacks.garbage_collection import GarbageCollection
from lightning_d9d.callbacks.initial_weights import InitialWeights
from lightning_d9d.callbacks.loss_curve import LossCurve
from lightning_d9d.callbacks.measured_step import MeasuredStep
from lightning_d9d.callbacks.pipeline_timeline import PipelineTimeline
from lightning_d9d.callbacks.predictions import PredictionWriter
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
    "GarbageCollection",
    "HuggingFaceExport",
    "InitialWeights",
    "LossCurve",
    "MeasuredStep",
    "PipelineTimeline",
    "PredictionWriter",
    "RunMetrics",
    "StartTimes",
    "StepProfile",
    "Stragglers",
    "TextSample",
    "WeightAverages",
]
