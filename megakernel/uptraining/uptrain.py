"""Up-training as one process of it."""

from megakernel.config import Config
from megakernel.parallel.processes import ProcessEnvironment
from megakernel.training.process import in_mesh


def uptrain(config: Config, process: ProcessEnvironment) -> int:
    """Go through the stages until the last is done or a request to stop; the exit status (0, 85 or 143).

    Raises UserError for what the user can mend.
    """

    def work(mesh) -> int:
        from megakernel.uptraining.run import Uptraining
        from megakernel.uptraining.stages import check_stages

        check_stages(config)
        return Uptraining(config, mesh).run()

    return in_mesh(config, process, work)
