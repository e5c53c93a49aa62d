"""Models of this project as `transformers` knows models. Importing this makes its Auto classes know them, too."""

from transformers import AutoConfig, AutoModelForCausalLM

from megakernel.checkpoint.pretrained_config import MegakernelConfig

from .model import MegakernelForCausalLM

__all__ = ["MegakernelConfig", "MegakernelForCausalLM"]

AutoConfig.register(MegakernelConfig.model_type, MegakernelConfig)
AutoModelForCausalLM.register(MegakernelConfig, MegakernelForCausalLM)
