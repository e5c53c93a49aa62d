"""Models of this project as `transformers` classes. Importing this module registers them with its Auto classes."""

from transformers import AutoConfig, AutoModelForCausalLM

from megakernel.checkpoint.pretrained_config import MegakernelConfig

from .model import MegakernelForCausalLM

__all__ = ["MegakernelConfig", "MegakernelForCausalLM"]

AutoConfig.register(MegakernelConfig.model_type, MegakernelConfig)
AutoModelForCausalLM.register(MegakernelConfig, MegakernelForCausalLM)
