"""One YAML file becomes one typed, validated tree. Reads no torch, so every command can afford it."""

from .attention import PRESETS, Attention, BlockCompression, FeatureMap, Near, expand_preset
from .data import Corpus, Data
from .errors import MISSING, ConfigError, Problem, RunFailed, UserError
from .load import from_yaml, load, to_yaml
from .model import Model
from .parallel import Parallel
from .resume import Difference, check_same_run, differences
from .training import Checkpoint, Logging, Optimizer, Schedule, Training
from .tree import Config, Run
from .world import data_parallel_size

__all__ = [
    "MISSING",
    "PRESETS",
    "Attention",
    "BlockCompression",
    "Checkpoint",
    "Config",
    "ConfigError",
    "Corpus",
    "Data",
    "Difference",
    "FeatureMap",
    "Logging",
    "Model",
    "Near",
    "Optimizer",
    "Parallel",
    "Problem",
    "Run",
    "RunFailed",
    "Schedule",
    "Training",
    "UserError",
    "check_same_run",
    "data_parallel_size",
    "differences",
    "expand_preset",
    "from_yaml",
    "load",
    "to_yaml",
]
