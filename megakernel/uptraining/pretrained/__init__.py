"""Models of this project as `transformers` knows models. Importing this makes its Auto classes know them, too."""

from transformers import AutoConfig, AutoModelForCausalLM

from megakernel.parallel.device import quieten_libraries

from .configuration import MegakernelConfig

quieten_libraries()  # before the model imports them
from .model import MegakernelForCausalLM  # noqa: E402

__all__ = ["MegakernelConfig", "MegakernelForCausalLM"]

AutoConfig.register(MegakernelConfig.model_type, MegakernelConfig)
AutoModelForCausalLM.register(MegakernelConfig, MegakernelForCausalLM)
