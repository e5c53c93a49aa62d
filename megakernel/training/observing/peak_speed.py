"""Peak speed of known GPUs; without torch, for the planner."""

DENSE_BF16_TFLOPS = {
    "B200": 2250.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "H100 NVL": 835.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "A100": 312.0,
}
"""Part of a device name -> peak from its data sheet, without sparsity; the first match applies."""


def peak_tflops(device_name: str) -> float | None:
    """Dense bfloat16 TFLOP/s of a device by its torch.cuda.get_device_name; None if unknown or a MIG slice."""
    if "MIG" in device_name:
        return None
    return next((peak for part, peak in DENSE_BF16_TFLOPS.items() if part in device_name), None)
