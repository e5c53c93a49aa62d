"""The typed, validated configuration of one YAML file. Imports no torch, so that every command starts fast."""

from .algebra import BlockCompression, Compression, LinformerCompression, Near, PoolCompression
from .attention import PRESETS, Attention, expand_preset
from .data import Corpus, Data, Masking
from .errors import MISSING, ConfigError, InUse, NotFinite, PreparationFailed, Problem, RunFailed, UserError
from .feature_map import FeatureMap
from .load import from_yaml, load, to_yaml
from .model import Classifier, Model
from .objective import Objective
from .parallel import Parallel
from .resume import (
    NOT_FINITE,
    UNPROVEN,
    Difference,
    check_recorded_run,
    check_same_run,
    differences,
    in_recorded_order,
)
from .rope import RopeScaling
from .training import Checkpoint, LengthPhase, Logging, Lora, Optimizer, Phase, Profile, Schedule, Training
from .tree import Config, Run, data_parallel_size
from .uptrain import KeptLayers, LengthStage, TransferStage, Uptrain
from .validation import validate_section
