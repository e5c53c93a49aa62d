"""What share of a device's limits each kind of work reaches."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Rates:
    """Shares of peak and bandwidth, and latencies in seconds."""

    matrix: float
    """Projections, MLP and head: share of the peak."""

    softmax: float
    """Fused softmax attention: share of the peak."""

    kernel: float
    """Feature maps, states, landmarks and windows: share of the peak."""

    memory: float
    """Everything that is no product: share of the memory's bandwidth."""

    link: float
    """Collectives inside a node: share of the link."""

    network: float
    """Collectives between nodes: share of the network."""

    link_latency: float
    """One step of a ring inside a node."""

    network_latency: float
    """One step of a ring between nodes."""

    source: str

    def as_text(self) -> str:
        """All of them on one line."""
        values = {name: value for name, value in asdict(self).items() if name != "source"}
        return ", ".join(f"{name} {value:g}" for name, value in values.items())


ASSUMED = Rates(
    matrix=0.65,
    softmax=0.5,
    kernel=0.25,
    memory=0.75,
    link=0.75,
    network=0.8,
    link_latency=3e-6,
    network_latency=8e-6,
    source="assumed: no GPU run stands behind them",
)
"""What predictions for GPUs rest on. The shares are round numbers in the range that trainers of this kind report."""

ACCURACY = {
    "kept": "bytes kept by a layer: off by +0.0% to +0.0%",
    "held": "bytes held at most: off by -2.5% to +3.0%",
}
"""How far the same model was off on a CPU: lines of benchmarks/results/plan_calibration_cpu.md; a test compares."""
