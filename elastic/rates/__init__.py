"""What the learning rate becomes when the batch does. The rules are pure; only ``stepping`` touches optimizers."""
