"""The model under training: loading, forward pass, loss, optimiser, LoRA, critic."""
