"""What a run shows of itself: console, metrics, TensorBoard, profiles."""
