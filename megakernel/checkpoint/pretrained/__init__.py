"""Models of this project as `transformers` classes. Importing this module registers them with its Auto classes.

They are the classes of `checkpoint/modeling` with this package's mechanisms and kernels in their layers, for all
mechanisms.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from megakernel.checkpoint.pretrained_config import MegakernelConfig

from .model import MegakernelForCausalLM, MegakernelModel

__all__ = ["MegakernelConfig", "MegakernelForCausalLM", "MegakernelModel"]

AutoConfig.register(MegakernelConfig.model_type, MegakernelConfig)
AutoModel.register(MegakernelConfig, MegakernelModel)
AutoModelForCausalLM.register(MegakernelConfig, MegakernelForCausalLM)
