"""Lightning callbacks.

`loss_curve.py` draws the losses of a fit, `text_sample.py` prints what a byte-level model writes, `export.py` leaves a
trained model, or its adapters, as a Hugging Face directory; these act at the end of `fit`. `initial_weights.py` begins
one with weights of a checkpoint. `predictions.py` writes what `predict` predicts. `pipeline_timeline.py` measures one
step of a pipeline, `start_times.py` the start of a fit, and `data_wait.py` the wait for batches. `run_metrics.py` logs
how fast a fit is and where its time goes, and `progress_lines.py` lines where no progress bar is seen.
`stragglers.py` names slow ranks. `garbage_collection.py` collects Python's garbage on all ranks together.
`background_loggers.py` keeps loggers from ending or stalling a fit, and goes on with their runs. `weight_averages.py`
averages weights over the steps of a fit, and `histograms.py` shows how their values are spread.
"""

from lightning_d9d.callbacks.background_loggers import BackgroundLoggers
from lightning_d9d.callbacks.data_wait import DataWait
from lightning_d9d.callbacks.export import AdapterExport, HuggingFaceExport
from lightning_d9d.callbacks.garbage_collection import GarbageCollection
from lightning_d9d.callbacks.histograms import Histograms
from lightning_d9d.callbacks.initial_weights import InitialWeights
from lightning_d9d.callbacks.loss_curve import LossCurve
from lightning_d9d.callbacks.pipeline_timeline import MeasuredStep, PipelineTimeline
from lightning_d9d.callbacks.predictions import PredictionWriter
from lightning_d9d.callbacks.progress_lines import ProgressLines
from lightning_d9d.callbacks.run_metrics import RunMetrics
from lightning_d9d.callbacks.start_times import StartTimes
from lightning_d9d.callbacks.stragglers import Stragglers
from lightning_d9d.callbacks.text_sample import TextSample
from lightning_d9d.callbacks.weight_averages import WeightAverages

__all__ = [
    "AdapterExport",
    "BackgroundLoggers",
    "DataWait",
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
    "Stragglers",
    "TextSample",
    "WeightAverages",
]
