"""Train PyTorch models over networks slower than the model."""
