"""What it will cost: work, depth, memory and energy of a model, and a plan that says how to train it."""
