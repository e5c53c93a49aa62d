"""The output of a run: console, metrics, TensorBoard, profiles."""
